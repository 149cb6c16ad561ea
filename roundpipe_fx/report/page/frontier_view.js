// The view of the frontier: the plans that were considered, and how each differs from this one.

function frontierView(data) {
  const { plan, alternatives } = data;
  const { frontier } = plan;
  const own = alternatives.chosen === null ? null : alternatives.plans[alternatives.chosen];
  // A pipeline that recomputes while devices wait need not be on the frontier: its step is what is shorter.
  const beside = own && !frontier.some(([bytes, seconds]) => bytes === own.bytes && seconds === own.seconds);
  const points = (beside ? [...frontier, [own.bytes, own.seconds]] : [...frontier]).sort(([a], [b]) => b - a);
  const planOf = points.map(([bytes, seconds]) =>
    alternatives.plans.find(one => one.bytes === bytes && one.seconds === seconds) || null);
  const ownPoint = own ? planOf.indexOf(own) : -1;
  const mostBytes = points.reduce((most, [bytes]) => Math.max(most, bytes), data.peak);
  // In tiles, operations take longer or, where the rest was slowed by memory, shorter: a plan can have less than none.
  const ownSeconds = own && own.tiles ? own.seconds : data.recomputeSeconds;
  const mostSeconds = points.reduce((most, [, seconds]) => Math.max(most, seconds), ownSeconds) || data.forwardSeconds || 1e-6;
  const leastSeconds = points.reduce((least, [, seconds]) => Math.min(least, seconds), 0);
  const seconds = (mostSeconds - leastSeconds) * 1.08;
  const panel = element("div", { class: "panel", "aria-live": "polite" });
  let chosen = ownPoint >= 0 ? ownPoint : nearest(data.peak, ownSeconds), plot = null;

  function headline() {
    const tiled = points.filter((point, at) => isTiled(at)).length;
    const parts = [`${countText(frontier.length - tiled, "plan")} that no other beats in peak and recomputation`];
    if (tiled) parts[0] += `, and ${countText(tiled, "plan")} in tiles`;
    if (beside) parts.push(plan.pipeline ? "this plan has a shorter step than those that fit" : "this plan is beside them");
    return parts.join("; ");
  }

  function nearest(bytes, at) {
    const distances = points.map(([size, time]) => Math.hypot((size - bytes) / mostBytes, (time - at) / mostSeconds));
    return distances.indexOf(Math.min(...distances));
  }

  const chart = drawing("The frontier: peak bytes against seconds of recomputation", 360, (context, width, tall) => {
    const top = 14, bottom = tall - 40;
    plot = {
      left: 74, right: width - 16, top, bottom,
      x: bytes => 74 + bytes / (mostBytes * 1.05) * (width - 90),
      y: at => bottom - (at - leastSeconds) / seconds * (bottom - top),
    };
    drawAxes(context, plot);
    drawSteps(context, plot);
    if (plan.budget !== null && plan.budget > mostBytes * 1.05) {
      drawLabel(context, `budget ${bytesText(plan.budget)}, above →`, plot.right - 6, top + 8, styleColor("alarm"), "right");
    } else if (plan.budget !== null) {
      drawDashed(context, [plot.x(plan.budget), top], [plot.x(plan.budget), bottom], styleColor("alarm"));
      const right = plan.budget > mostBytes / 2;
      drawLabel(context, `budget ${bytesText(plan.budget)}`, plot.x(plan.budget) + (right ? -8 : 8), top + 8, styleColor("alarm"), right ? "right" : "left");
    }
    points.forEach((point, at) => drawPoint(context, plot, point, at));
    drawOwn(context, plot);
  });
  const { canvas } = chart;
  canvas.setAttribute("role", "slider");
  canvas.setAttribute("aria-valuemin", 0);
  canvas.setAttribute("aria-valuemax", Math.max(points.length - 1, 0));

  function drawAxes(context, { left, right, top, bottom, x, y }) {
    context.fillStyle = styleColor("quiet");
    context.strokeStyle = styleColor("line");
    context.textBaseline = "middle";
    context.textAlign = "right";
    for (const tick of signedTicks(leastSeconds * 1e3, mostSeconds * 1e3)) {
      const at = Math.round(y(tick / 1e3)) + 0.5;
      context.beginPath();
      context.moveTo(left, at);
      context.lineTo(right, at);
      context.stroke();
      context.fillText(`${Number(tick.toPrecision(3))} ms`, left - 8, at);
    }
    context.textAlign = "center";
    for (const tick of byteTicks(mostBytes, 6)) context.fillText(bytesText(tick), x(tick), bottom + 12);
    context.fillText(plan.pipeline ? "peak of the device that needs most" : "peak of a step", (left + right) / 2, bottom + 30);
    context.textAlign = "left";
    context.fillText("recomputation, modelled", left + 4, top - 6);
  }

  /** What memory buys: between two points only the plan with the lower peak fits. */
  function drawSteps(context, { x, y }) {
    context.strokeStyle = categoryColor(0);
    context.lineWidth = 1.5;
    context.beginPath();
    frontier.forEach(([bytes, seconds], at) => {
      if (at) context.lineTo(x(frontier[at - 1][0]), y(seconds));
      context.lineTo(x(bytes), y(seconds));
    });
    context.stroke();
  }

  function isTiled(at) {
    return Boolean(planOf[at] && planOf[at].tiles);
  }

  function drawPoint(context, { x, y }, [bytes, seconds], at) {
    context.beginPath();
    context.arc(x(bytes), y(seconds), at === chosen ? 7 : 4, 0, 2 * Math.PI);
    const color = isTiled(at) ? fateColor("tiled") : categoryColor(0);
    context.fillStyle = planOf[at] ? color : styleColor("ground");
    context.strokeStyle = at === chosen ? styleColor("text") : color;
    context.lineWidth = at === chosen ? 2.5 : 1.5;
    context.fill();
    context.stroke();
  }

  function drawOwn(context, { x, y }) {
    const [left, top] = [x(data.peak), y(ownSeconds)];
    context.fillStyle = categoryColor(1);
    context.strokeStyle = styleColor("ground");
    context.lineWidth = 1.5;
    context.beginPath();
    context.moveTo(left, top - 7);
    context.lineTo(left + 7, top);
    context.lineTo(left, top + 7);
    context.lineTo(left - 7, top);
    context.closePath();
    context.fill();
    context.stroke();
    const right = data.peak > 0.9 * mostBytes;
    drawLabel(context, "this plan", left + (right ? -12 : 12), top - 12, categoryColor(1), right ? "right" : "left");
  }

  // Of one device; a pipeline's plans have a row for each.
  const curve = curveChart("Memory over the step of the chosen plan", 190, () => {
    const other = planOf[chosen];
    if (!other) return [];
    const curves = [{ bytes: other.curve, forward: other.forward, name: chosen === ownPoint ? "this plan" : "that plan", color: () => categoryColor(0) }];
    if (chosen === ownPoint) return curves;
    const mine = own ? { bytes: own.curve, forward: own.forward } : curveOf(data);
    return [...curves, { ...mine, name: "this plan", color: () => categoryColor(1) }];
  }, plan.budget);

  const ofDevices = own && plan.pipeline ? alternativeDevices(plan, own, () => planOf[chosen]) : null;

  const differences = virtualTable({
    label: "What differs from this plan", height: Math.max(230, window.innerHeight - 620), sort: ["bytes", true],
    columns: [
      { key: "change", title: "in that plan", width: 190, text: row => row.change, mark: row => fateColor(row.change === "recomputed there" ? "recomputed" : "saved") },
      { key: "bytes", title: "bytes", width: 104, number: true, text: row => bytesText(row.bytes), order: row => row.bytes },
      { key: "seconds", title: "computing it takes", width: 152, number: true, text: row => millisecondsText(row.seconds), order: row => row.seconds },
      { key: "name", title: "value", width: 200, mono: true, text: row => row.name },
      { key: "module", title: "module", width: 260, text: row => row.module },
      { key: "line", title: "your line", width: 190, mono: true, text: row => row.line },
      { key: "source", title: "what it says", width: 420, mono: true, text: row => data.source[row.line] || "" },
    ],
  });

  const differenceCount = element("h2", { id: "difference-count" });
  const difference = element("div", { class: "block", hidden: true }, differenceCount, differences.box);

  function choose(at) {
    if (!points.length) return;
    chosen = Math.min(points.length - 1, Math.max(0, at));
    const [bytes, seconds] = points[chosen];
    canvas.setAttribute("aria-valuenow", chosen);
    canvas.setAttribute("aria-valuetext", `plan ${chosen + 1} of ${points.length}: ${bytesText(bytes)}, ${millisecondsText(seconds)} recomputed`);
    showPlan(bytes, seconds, planOf[chosen]);
    chart.redraw();
    curve.redraw();
  }

  function showPlan(bytes, seconds, other) {
    const parts = [
      element("h2", {}, `${bytesText(bytes)}, ${other && other.tiles ? `in tiles: ${signed(seconds, millisecondsText)}` : `recomputes ${millisecondsText(seconds)}`}`),
      facts([
        ["against this plan", chosen === ownPoint ? "it is this plan" : `${signed(bytes - data.peak, bytesText)}, ${signed(seconds - ownSeconds, millisecondsText)}`],
        ...(seconds >= 0 ? [["of the forward", shareText(seconds, data.forwardSeconds)]] : []),
        ...(plan.pipeline && other ? [["a step, modelled", `${millisecondsText(other.makespan)}${other === own ? "" : `, ${signed(other.makespan - own.makespan, millisecondsText)}`}`],
          ["during actions", deviceRange(other.devices)]] : []),
      ]),
    ];
    if (other && other.tiles) {
      parts.push(element("p", { class: "note" }, `Carried out in tiles, so sums round differently: ${other.tiles}. The time is that of recomputation and of what tiles change.`));
    }
    if (!other) {
      parts.push(element("p", { class: "note" }, "This plan was tried on the way and is not among those that a search finds again: only these figures are known."));
    } else if (!plan.pipeline) {
      parts.push(curve.box);
      const highest = other.curve.reduce((a, b) => Math.max(a, b), 0);
      if (highest !== bytes) {
        parts.push(element("p", { class: "note" }, `The curve's peak is ${bytesText(highest)}: it does not count equal values once, or shows one of several calls.`));
      }
    }
    if (other && plan.pipeline && bytes > Math.max(...other.devices.flat())) {
      parts.push(element("p", { class: "note" }, "Its peak is outside of actions: while a loss outside of the model is computed, or at the end of the step."));
    }
    if (ofDevices) ofDevices.redraw();
    showDifferences(other);
    panel.replaceChildren(...parts);
  }

  function showDifferences(other) {
    difference.hidden = !own || !other || other === own;
    if (difference.hidden) return;
    const between = (here, there) => { const known = new Set(here); return there.filter(at => !known.has(at)); };
    const row = change => at => ({ ...alternatives.values[at], change });
    const recomputed = between(own.recomputed, other.recomputed).map(row("recomputed there"));
    const saved = between(other.recomputed, own.recomputed).map(row("not recomputed there"));
    differences.show([...recomputed, ...saved]);
    const sum = rows => bytesText(rows.reduce((total, one) => total + one.bytes, 0));
    differenceCount.textContent = `${countText(recomputed.length, "value")} (${sum(recomputed)}) recomputed there and not here, `
      + `${saved.length.toLocaleString("en")} (${sum(saved)}) recomputed here and not there`;
  }

  canvas.addEventListener("click", event => {
    let best = 0, least = Infinity;
    points.forEach(([bytes, seconds], at) => {
      const distance = Math.hypot(plot.x(bytes) - event.offsetX, plot.y(seconds) - event.offsetY);
      if (distance < least) [best, least] = [at, distance];
    });
    choose(best);
  });
  canvas.addEventListener("keydown", event => {
    const moves = { ArrowRight: chosen - 1, ArrowUp: chosen + 1, ArrowLeft: chosen + 1, ArrowDown: chosen - 1, Home: points.length - 1, End: 0, p: ownPoint };
    if (!(event.key in moves)) return;
    choose(moves[event.key]);
    event.preventDefault();
  });

  const section = element("section", { "aria-label": "Frontier" },
    element("div", { class: "bar" }, element("span", {}, headline()), element("span", { class: "spring" }),
      element("span", { class: "hint" }, element("kbd", {}, "←"), " ", element("kbd", {}, "→"), " plans, ", element("kbd", {}, "p"), " this plan")),
    element("div", { class: "split" }, chart.box, panel), ofDevices ? ofDevices.box : "", difference);
  return { section, focus: canvas, shown: () => { choose(chosen); } };
}

/** Ticks of an axis that may begin below zero. */
function signedTicks(least, most) {
  const above = plainTicks(Math.max(most, -least), 6);
  return [...above.filter(tick => tick && tick <= -least).map(tick => -tick), ...above.filter(tick => tick <= most)];
}

function signed(value, text) {
  return value > 0 ? `+${text(value)}` : value < 0 ? `−${text(-value)}` : text(0);
}

/** The most that each device allocates in an action. */
function deviceRange(devices) {
  const peaks = devices.map(bytes => bytes.reduce((a, b) => Math.max(a, b), 0));
  const [least, most] = [Math.min(...peaks), Math.max(...peaks)];
  return least === most ? `${bytesText(most)} a device` : `${bytesText(least)} to ${bytesText(most)} a device`;
}

/** Start, end and bytes of the runs of equal pieces of a curve. */
function stepsOf(pieces, seconds) {
  const steps = [], wide = seconds / pieces.length;
  pieces.forEach((bytes, at) => {
    if (at && bytes === pieces[at - 1]) steps[steps.length - 1][1] = (at + 1) * wide;
    else steps.push([at * wide, (at + 1) * wide, bytes]);
  });
  return steps;
}

/** Memory of each device in a pipeline's chosen plan, with this plan's as lines. */
function alternativeDevices(plan, own, other) {
  const { pipeline } = plan;
  const devices = deviceWindow(pipeline.peak_bytes, plan.budget, redraw, "peak of each device in this plan");
  const most = axisTop(Math.max(...plan.alternatives.plans.map(({ bytes }) => bytes)), plan.budget) * 1.06;
  const steps = (one, name, color) => ({
    name, color, end: one.makespan,
    of: device => stepsOf(one.devices[device], one.makespan),
  });
  const chart = deviceMemoryRows("Memory of each device in the chosen plan", devices, () => {
    const that = other();
    const mine = steps(own, "this plan", () => categoryColor(that && that !== own ? 1 : 0));
    return that && that !== own ? [steps(that, "that plan", () => categoryColor(0)), mine] : [mine];
  }, { most, budget: plan.budget });

  function redraw() {
    devices.redraw();
    chart.redraw();
  }

  return { redraw, box: element("div", { class: "block" }, devices.box, element("h2", {}, "memory of each device while its actions run, predicted"), chart.box) };
}
