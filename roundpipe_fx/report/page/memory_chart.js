// Memory over the step: bytes alive at each moment, stacked, with the budget, the peak and the chosen moment.

const MOST_LAYERS = 11;
const STACKS = [["kind", "kind of module"], ["module", "module"], ["fate", "what happens"]];

/** What a value is stacked with. */
function layerOf(lifetime, stacking) {
  if (stacking === "fate") return lifetime.value ? lifetime.value.fate : "backward";
  if (lifetime.gradient) return "gradients";
  if (!lifetime.module) return lifetime.line || lifetime.name;
  if (stacking === "kind") return folded(lifetime.module);
  // Down to the first number: model.layers.12.
  return /^(.*?(?<![^. ])\d+)(\.|$)/.exec(lifetime.module)?.[1] || lifetime.module;
}

const layerNumbers = new Map();

/** The same for a layer of the same name in another plan, so that both have one colour. */
function layerNumber(name) {
  if (!layerNumbers.has(name)) layerNumbers.set(name, layerNumbers.size);
  return layerNumbers.get(name);
}

/** Layers from the bottom up, each with bytes at every moment; the smallest ones together are the last but one. */
function stackOf(data, stacking) {
  const count = data.moments.length;
  const changes = new Map();
  for (const lifetime of data.lifetimes) {
    const layer = layerOf(lifetime, stacking);
    if (!changes.has(layer)) changes.set(layer, new Float64Array(count + 1));
    const change = changes.get(layer);
    change[lifetime.first] += lifetime.bytes;
    change[lifetime.last + 1] -= lifetime.bytes;
  }
  const layers = [...changes].map(([name, change]) => {
    const bytes = new Float64Array(count);
    let level = 0, most = 0;
    for (let at = 0; at < count; at += 1) {
      level += change[at];
      bytes[at] = level;
      most = Math.max(most, level);
    }
    return { name, bytes, most };
  }).sort((a, b) => b.most - a.most);
  const shown = layers.slice(0, MOST_LAYERS);
  const beside = (name, of) => {
    const bytes = Float64Array.from({ length: count }, (_, at) => of(at));
    const most = bytes.reduce((a, b) => Math.max(a, b), 0);
    return most > 0 ? [{ name, bytes, most, rest: true }] : [];
  };
  const rest = layers.slice(MOST_LAYERS);
  const sums = new Float64Array(count);
  for (const layer of layers) for (let at = 0; at < count; at += 1) sums[at] += layer.bytes[at];
  const colored = shown.map(layer => {
    const number = stacking === "fate" ? 0 : layerNumber(layer.name);
    return { ...layer, color: () => stacking === "fate" ? fateColor(layer.name) : categoryColor(number) };
  });
  const others = [
    ...beside(countText(rest.length, "smaller one"), at => rest.reduce((sum, layer) => sum + layer.bytes[at], 0)),
    ...beside(data.plan.tiles.length ? "workspaces of kernels, and tiles" : "workspaces of kernels", at => data.moments[at].workspace),
    ...beside("rounding of the allocator", at => Math.max(0, data.moments[at].bytes - data.moments[at].workspace - sums[at])),
  ];
  return [...colored, ...others.map((layer, at) => ({ ...layer, color: () => at ? styleColor("quiet") : restColor() }))];
}

/** The chart; `select` is called with the number of the moment that is chosen. */
function memoryChart(data, { select, height = 340, most = 0, label = "Memory over the step" }) {
  const { moments, plan } = data;
  const highest = moments.reduce((best, moment, at) => moment.bytes > moments[best].bytes ? at : best, 0);
  const budget = plan.pipeline ? null : plan.budget;
  const scaled = Math.max(most, axisTop(moments.length ? moments[highest].bytes : 0, budget));
  const state = { moment: highest, from: 0, to: moments.length, stacking: "kind" };
  let layers = stackOf(data, state.stacking), plot = null;
  const legend = element("ul", { class: "legend" });
  const chart = drawing(label, height, draw);
  const { canvas } = chart;
  canvas.setAttribute("role", "slider");
  canvas.setAttribute("aria-valuemin", 0);
  canvas.setAttribute("aria-valuemax", Math.max(moments.length - 1, 0));

  const x = moment => plot.left + (moment - state.from) / (state.to - state.from) * (plot.right - plot.left);
  const momentAt = px => Math.min(state.to - 1, Math.max(state.from,
    Math.floor(state.from + (px - plot.left) / (plot.right - plot.left) * (state.to - state.from))));

  /** Of the moments under one pixel the highest, so that no peak is lost. */
  function highestNear(px) {
    let best = momentAt(px);
    for (let at = momentAt(px - 0.5); at <= momentAt(px + 0.5); at += 1) if (moments[at].bytes > moments[best].bytes) best = at;
    return best;
  }

  function draw(context, width, tall) {
    const top = 22, bottom = tall - 22;
    plot = { left: 74, right: width - 8, height: bottom - top, y: bytes => bottom - bytes / (scaled * 1.04) * (bottom - top) };
    drawByteAxis(context, plot, scaled);
    drawLayers(context);
    drawPhases(context, top, bottom);
    drawBudgetLine(context, plot, budget, scaled);
    drawPeak(context);
    drawCursor(context, top, bottom);
  }

  function drawLayers(context) {
    const steps = [];
    if (state.to - state.from <= plot.right - plot.left) {
      for (let at = state.from; at < state.to; at += 1) steps.push([x(at), at]);
    } else {
      for (let px = plot.left; px < plot.right; px += 1) steps.push([px, highestNear(px + 0.5)]);
    }
    const level = new Float64Array(steps.length);
    const uppers = layers.map(layer => steps.map(([, moment], at) => { level[at] += layer.bytes[moment]; return level[at]; }));
    // From the top layer down, each to the ground: so no seams show between them.
    for (let place = layers.length - 1; place >= 0; place -= 1) {
      context.fillStyle = layers[place].color();
      context.beginPath();
      context.moveTo(plot.left, plot.y(0));
      steps.forEach(([px], at) => {
        const y = plot.y(uppers[place][at]);
        context.lineTo(px, y);
        context.lineTo(at + 1 < steps.length ? steps[at + 1][0] : plot.right, y);
      });
      context.lineTo(plot.right, plot.y(0));
      context.fill();
    }
  }

  function drawPhases(context, top, bottom) {
    const boundary = data.forwardMoments;
    context.textBaseline = "middle";
    context.textAlign = "center";
    context.fillStyle = styleColor("quiet");
    const phases = plan.training ? [["forward", 0, boundary], ["backward", boundary, moments.length]]
      : [["forward", 0, moments.length]];
    for (const [name, from, to] of phases) {
      const left = Math.max(x(from), plot.left), right = Math.min(x(to), plot.right);
      if (right - left > 60) context.fillText(name, (left + right) / 2, bottom + 12);
    }
    if (plan.training && boundary > state.from && boundary < state.to) {
      drawDashed(context, [x(boundary), top], [x(boundary), bottom + 16], styleColor("quiet"), [2, 3]);
    }
  }

  function drawPeak(context) {
    if (!moments.length || highest < state.from || highest >= state.to) return;
    const px = Math.min(x(highest + 0.5), plot.right), y = plot.y(moments[highest].bytes);
    context.fillStyle = styleColor("text");
    context.strokeStyle = styleColor("ground");
    context.lineWidth = 2;
    context.beginPath();
    context.moveTo(px, y - 1);
    context.lineTo(px - 5, y - 10);
    context.lineTo(px + 5, y - 10);
    context.closePath();
    context.stroke();
    context.fill();
    const right = px > (plot.left + plot.right) / 2;
    drawLabel(context, `peak ${bytesText(moments[highest].bytes)}`, px + (right ? -11 : 11), y - 9, styleColor("text"), right ? "right" : "left");
  }

  function drawCursor(context, top, bottom) {
    if (!moments.length || state.moment < state.from || state.moment >= state.to) return;
    const left = x(state.moment), wide = Math.max(1.5, x(state.moment + 1) - left);
    const middle = Math.round(left + wide / 2) + 0.5;
    context.save();
    context.fillStyle = styleColor("cursor");
    context.globalAlpha = 0.18;
    if (wide > 3) context.fillRect(left, top, wide, bottom - top);
    context.globalAlpha = 0.6;
    context.fillRect(middle - 0.5, top, 1, bottom - top);
    context.globalAlpha = 1;
    context.beginPath();
    context.moveTo(middle, bottom);
    context.lineTo(middle - 5, bottom + 7);
    context.lineTo(middle + 5, bottom + 7);
    context.fill();
    context.restore();
  }

  function choose(moment) {
    if (!moments.length) return;
    state.moment = Math.min(moments.length - 1, Math.max(0, moment));
    const width = state.to - state.from;
    if (state.moment < state.from) [state.from, state.to] = [state.moment, state.moment + width];
    if (state.moment >= state.to) [state.from, state.to] = [state.moment + 1 - width, state.moment + 1];
    const at = moments[state.moment];
    canvas.setAttribute("aria-valuenow", state.moment);
    canvas.setAttribute("aria-valuetext", `moment ${state.moment + 1} of ${moments.length}, ${at.value} in ${at.call}: ${bytesText(at.bytes)}`);
    chart.redraw();
    select(state.moment);
    showLegend();
  }

  function zoom(factor) {
    const width = Math.max(8, Math.min(moments.length, Math.round((state.to - state.from) * factor)));
    state.from = Math.max(0, Math.min(moments.length - width, Math.round(state.moment - width / 2)));
    state.to = state.from + width;
    chart.redraw();
  }

  function stackBy(stacking) {
    state.stacking = stacking;
    layers = stackOf(data, stacking);
    showLegend();
    chart.redraw();
  }

  /** The colour of the layer that a value is in. */
  function colorOf(lifetime) {
    const name = layerOf(lifetime, state.stacking);
    const layer = layers.find(own => own.name === name && !own.rest);
    return layer ? layer.color() : restColor();
  }

  function showLegend() {
    const seen = layers.filter(({ most: own }) => own > scaled / 1000);
    legend.replaceChildren(...seen.map(layer => element("li", {}, swatch(layer.color()),
      element("span", { title: layer.name }, fateText(layer.name), " ",
        element("span", { class: "size" }, bytesText(moments.length ? layer.bytes[state.moment] : 0))))));
  }

  canvas.addEventListener("click", event => choose(highestNear(event.offsetX)));
  canvas.addEventListener("pointermove", event => {
    if (event.buttons & 1) choose(highestNear(event.offsetX));
    const at = moments.length && plot ? moments[highestNear(event.offsetX)] : null;
    chart.showTip(event.offsetX, event.offsetY, at && `${bytesText(at.bytes)} · ${at.value}${at.module ? ` in ${at.module}` : ""}`);
  });
  canvas.addEventListener("pointerleave", () => chart.showTip(0, 0, ""));
  canvas.addEventListener("keydown", event => {
    const far = Math.max(10, Math.round((state.to - state.from) / 20));
    const stride = event.shiftKey ? far : 1;
    const moves = { ArrowRight: state.moment + stride, ArrowLeft: state.moment - stride, PageDown: state.moment + far,
      PageUp: state.moment - far, Home: 0, End: moments.length - 1, p: highest };
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key in moves) choose(moves[event.key]);
    else if (event.key === "+" || event.key === "=") zoom(0.5);
    else if (event.key === "-") zoom(2);
    else if (event.key === "0") zoom(Infinity);
    else return;
    event.preventDefault();
  });
  darkScheme.addEventListener("change", showLegend);
  return { ...chart, legend, choose, stackBy, colorOf, zoom, highest, layers: () => layers, moment: () => state.moment };
}
