// The view of a pipeline: what each device runs when, as predicted and measured, its waits, transfers and memory.

const ACTIONS = { F: "forward", R: "recompute", B: "backward", I: "backward of inputs", W: "backward of parameters" };
const MOST_DEVICES = 64;

function pipelineView(data) {
  const { plan } = data;
  const { pipeline, timeline } = plan;
  const shown = [["predicted", "predicted"], ["measured", "measured in the latest step"]]
    .filter(([key]) => timeline && timeline[key].length)
    .map(([key, title]) => ({ key, title, bars: barsOf(timeline[key]) }));
  const devices = Math.min(pipeline.devices.length, MOST_DEVICES);
  const panel = element("div", { class: "panel", "aria-live": "polite" });
  const charts = shown.map(one => timelineChart(one, pipeline, devices, show));
  const kinds = Object.keys(ACTIONS).filter(kind => shown.some(({ bars }) => bars.some(bar => bar.kind === kind)));
  const legend = element("ul", { class: "legend" });

  function drawLegend() {
    legend.replaceChildren(...kinds.map(kind => element("li", {}, swatch(actionColor(kind)), element("span", {}, ACTIONS[kind]))),
      element("li", {}, swatch(styleColor("sunken")), element("span", {}, "waiting (bubble)")),
      element("li", {}, element("span", {}, "╱ transfer between devices")));
  }

  function show(bar, bars) {
    const counterparts = shown.flatMap(({ key, bars: all }) => all.filter(one => one.action === bar.action && one.device === bar.device)
      .map(one => [key, `${millisecondsText(one.end - one.start)}, from ${millisecondsText(one.start)}`]));
    const predicted = shown.length ? shown[0].bars.find(one => one.action === bar.action && one.device === bar.device) : null;
    const [stage, microbatch] = bar.action.slice(1).split(".");
    const before = bars.filter(one => one.device === bar.device && one.end <= bar.start + 1e-12).reduce((latest, { end }) => Math.max(latest, end), 0);
    panel.replaceChildren(
      element("h2", {}, `${ACTIONS[bar.kind]} of stage ${stage}, microbatch ${microbatch}`),
      facts([["device", `${bar.device}: ${pipeline.devices[bar.device] || ""}`], ["stage", plan.stages[stage]?.modules || ""], ...counterparts,
        ["waited before", millisecondsText(Math.max(0, bar.start - before))],
        ["device's memory", predicted && predicted.bytes ? `${bytesText(predicted.bytes)}, predicted` : ""]]));
  }

  const memory = shown.length && shown[0].key === "predicted" ? deviceMemoryChart(shown[0].bars, data, devices) : null;
  const section = element("section", { "aria-label": "Pipeline" },
    element("p", { class: "note" }, `${countText(pipeline.microbatches, "microbatch").replace("microbatchs", "microbatches")} by schedule ${pipeline.schedule} on ${countText(pipeline.devices.length, "device")}`
      + `; a step takes ${millisecondsText(pipeline.makespan)} modelled, of which the devices wait ${(100 * pipeline.bubble).toFixed(1)} %`
      + (pipeline.brought_bytes ? `; ${bytesText(pipeline.brought_bytes)} of the model are copied to the devices` : "")
      + (devices < pipeline.devices.length ? `. Drawn are the first ${devices} devices.` : ".")),
    element("div", { class: "split" },
      element("div", { class: "block" }, charts.map(({ title, chart }) => [element("h2", {}, title), chart.box]),
        shown.length ? legend : element("p", { class: "note" }, "This plan has no timeline, or one of too many actions to draw."),
        memory ? [element("h2", {}, "memory of each device while its actions run, predicted"), memory.box] : "", deviceTable(data, shown, devices)),
      panel));
  panel.append(element("p", { class: "note" }, "Choose an action, by click or arrow keys, to see its times, what it waited for and the device's memory."));
  darkScheme.addEventListener("change", drawLegend);
  return { section, focus: charts.length ? charts[0].chart.canvas : section, shown: () => { drawLegend(); charts.forEach(({ chart }) => chart.redraw()); if (memory) memory.redraw(); } };
}

const DEVICE_HEIGHT = 26;

function timelineChart({ key, title, bars }, pipeline, devices, select) {
  const end = bars.reduce((latest, bar) => Math.max(latest, bar.end), 0) || 1;
  const transfers = transfersOf(pipeline.order, bars).filter(([from, to]) => from.device < devices && to.device < devices);
  const rows = Array.from({ length: devices }, (_, device) => bars.filter(bar => bar.device === device).sort((a, b) => a.start - b.start));
  let chosen = null, plot = null;
  const chart = drawing(`Timeline, ${key}`, devices * DEVICE_HEIGHT + 26, (context, width, tall) => {
    plot = { left: 74, right: width - 8, x: seconds => 74 + seconds / end * (width - 82) };
    context.textBaseline = "middle";
    rows.forEach((own, device) => drawDevice(context, own, device));
    drawTransfers(context);
    context.fillStyle = styleColor("quiet");
    context.textAlign = "center";
    for (const tick of plainTicks(end * 1e3, 7)) {
      if (plot.x(tick / 1e3) < plot.right - 20) context.fillText(`${Number(tick.toPrecision(4))} ms`, plot.x(tick / 1e3), tall - 10);
    }
  });
  const { canvas } = chart;

  function drawDevice(context, own, device) {
    const top = device * DEVICE_HEIGHT + 3, high = DEVICE_HEIGHT - 6;
    context.fillStyle = styleColor("quiet");
    context.textAlign = "right";
    context.fillText(`device ${device}`, plot.left - 8, top + high / 2);
    context.fillStyle = styleColor("sunken");
    context.fillRect(plot.left, top, plot.right - plot.left, high);
    context.textAlign = "center";
    for (const bar of own) {
      const left = plot.x(bar.start), wide = Math.max(plot.x(bar.end) - left, 1);
      context.fillStyle = actionColor(bar.kind);
      context.fillRect(left, top, wide > 3 ? wide - 1 : wide, high);
      const label = bar.action.slice(1);
      if (wide > context.measureText(label).width + 6) {
        context.fillStyle = darkScheme.matches ? "#14171b" : "#ffffff";
        context.fillText(label, left + wide / 2, top + high / 2);
      }
      if (bar === chosen) {
        context.strokeStyle = styleColor("text");
        context.lineWidth = 2;
        context.strokeRect(left, top, wide, high);
      }
    }
  }

  function drawTransfers(context) {
    context.save();
    context.strokeStyle = styleColor("text");
    for (const [from, to] of transfers) {
      const own = chosen && (from === chosen || to === chosen);
      if (transfers.length > 400 && !own) continue;
      context.globalAlpha = own ? 1 : 0.35;
      context.lineWidth = own ? 2 : 1;
      context.beginPath();
      context.moveTo(plot.x(from.end), (from.device + 0.5) * DEVICE_HEIGHT);
      context.lineTo(plot.x(to.start), (to.device + 0.5) * DEVICE_HEIGHT);
      context.stroke();
    }
    context.restore();
  }

  function barAt(px, py) {
    const own = rows[Math.floor(py / DEVICE_HEIGHT)] || [];
    return own.find(bar => plot.x(bar.start) <= px && px <= Math.max(plot.x(bar.end), plot.x(bar.start) + 2)) || null;
  }

  function choose(bar) {
    if (!bar) return;
    chosen = bar;
    canvas.setAttribute("aria-label", `Timeline, ${key}: ${bar.action} on device ${bar.device}, ${millisecondsText(bar.end - bar.start)}`);
    chart.redraw();
    select(bar, bars);
  }

  canvas.addEventListener("click", event => choose(barAt(event.offsetX, event.offsetY)));
  canvas.addEventListener("pointermove", event => {
    const bar = barAt(event.offsetX, event.offsetY);
    chart.showTip(event.offsetX, event.offsetY, bar && `${bar.action} · ${millisecondsText(bar.end - bar.start)}`);
  });
  canvas.addEventListener("pointerleave", () => chart.showTip(0, 0, ""));
  canvas.addEventListener("keydown", event => {
    if (!["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown"].includes(event.key)) return;
    event.preventDefault();
    if (!chosen) { choose(rows.flat()[0]); return; }
    const own = rows[chosen.device], at = own.indexOf(chosen);
    if (event.key === "ArrowLeft") choose(own[Math.max(at - 1, 0)]);
    else if (event.key === "ArrowRight") choose(own[Math.min(at + 1, own.length - 1)]);
    else {
      const other = rows[chosen.device + (event.key === "ArrowUp" ? -1 : 1)] || [];
      choose(other.find(bar => bar.end > chosen.start) || other[other.length - 1]);
    }
  });
  return { title, chart };
}

/** Steps of memory, a row for each device, all to one scale. */
function deviceMemoryChart(bars, { plan }, devices) {
  const { pipeline } = plan, high = 58;
  const end = bars.reduce((latest, bar) => Math.max(latest, bar.end), 0) || 1;
  const most = axisTop(Math.max(...pipeline.peak_bytes), plan.budget) * 1.06;
  return drawing("Memory of each device while its actions run, predicted", devices * high + 4, (context, width) => {
    const x = seconds => 74 + seconds / end * (width - 82);
    context.textBaseline = "middle";
    for (let device = 0; device < devices; device += 1) {
      const bottom = (device + 1) * high - 4, y = bytes => bottom - bytes / most * (high - 10);
      context.fillStyle = styleColor("sunken");
      context.fillRect(74, bottom, width - 82, 1);
      context.fillStyle = categoryColor(0);
      context.globalAlpha = 0.75;
      for (const bar of bars) if (bar.device === device) context.fillRect(x(bar.start), y(bar.bytes), Math.max(x(bar.end) - x(bar.start), 1), bottom - y(bar.bytes));
      context.globalAlpha = 1;
      const peak = pipeline.peak_bytes[device];
      drawDashed(context, [74, y(peak)], [width - 8, y(peak)], styleColor("quiet"), [2, 3]);
      drawLabel(context, `peak ${bytesText(peak)}`, 82, y(peak) + 9, styleColor("text"));
      if (plan.budget !== null && plan.budget <= most) drawDashed(context, [74, y(plan.budget)], [width - 8, y(plan.budget)], styleColor("alarm"));
      context.fillStyle = styleColor("quiet");
      context.textAlign = "right";
      context.fillText(`device ${device}`, 66, bottom - high / 2 + 6);
    }
  });
}

function deviceTable({ plan }, shown, devices) {
  const { pipeline } = plan;
  const busy = (bars, device) => bars.filter(bar => bar.device === device).reduce((sum, bar) => sum + bar.end - bar.start, 0);
  const spans = shown.map(({ key, bars }) => ({ key, bars, whole: key === "predicted" ? pipeline.makespan : bars.reduce((latest, bar) => Math.max(latest, bar.end), 0) }));
  const rows = Array.from({ length: devices }, (_, device) => element("tr", {},
    element("td", {}, `${device}: ${pipeline.devices[device]}`), element("td", {}, bytesText(pipeline.peak_bytes[device])),
    element("td", {}, plan.budget === null ? "" : shareText(pipeline.peak_bytes[device], plan.budget)),
    spans.flatMap(({ bars, whole }) => [element("td", {}, millisecondsText(busy(bars, device))), element("td", {}, shareText(whole - busy(bars, device), whole))])));
  return element("table", { class: "plain" },
    element("thead", {}, element("tr", {}, ["device", "peak", plan.budget === null ? "" : "of the budget", ...spans.flatMap(({ key }) => [`busy, ${key}`, `waiting, ${key}`])].map(text => element("th", { scope: "col" }, text)))),
    element("tbody", {}, rows));
}
