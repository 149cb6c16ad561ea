// A canvas that fills its box at the screen's resolution and is drawn anew when either changes.

/**
 * @param label what it shows, for those who do not see it
 * @param height in CSS pixels, or a function of the width that gives it
 * @param draw called with the context, the width and the height
 */
function drawing(label, height, draw) {
  const canvas = element("canvas", { tabindex: "0", "aria-label": label });
  const tip = element("div", { class: "tip", hidden: true, "aria-hidden": "true" });
  const box = element("div", { class: "chart" }, canvas, tip);
  let pending = false;

  function redrawNow() {
    pending = false;
    const width = box.clientWidth;
    if (!width) return;
    const tall = typeof height === "function" ? height(width) : height;
    const scale = window.devicePixelRatio || 1;
    canvas.style.height = `${tall}px`;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(tall * scale);
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    context.clearRect(0, 0, width, tall);
    context.font = "11px system-ui, 'DejaVu Sans', sans-serif";
    draw(context, width, tall);
  }

  function redraw() {
    if (!pending) { pending = true; requestAnimationFrame(redrawNow); }
  }

  function showTip(x, y, text) {
    tip.hidden = !text;
    if (!text) return;
    tip.textContent = text;
    const right = x > box.clientWidth / 2;
    tip.style.left = right ? "auto" : `${x + 12}px`;
    tip.style.right = right ? `${box.clientWidth - x + 12}px` : "auto";
    tip.style.top = `${Math.max(y - 30, 0)}px`;
  }

  new ResizeObserver(redraw).observe(box);
  darkScheme.addEventListener("change", redraw);
  return { box, canvas, redraw, redrawNow, showTip };
}

/** Round numbers of bytes for an axis, from 0 to at least `most`. */
function byteTicks(most, count) {
  if (!(most > 0)) return [0];
  const unit = 1024 ** Math.min(Math.floor(Math.log(most) / Math.log(1024)), 3);
  return [...plainTicks(most / unit, count)].map(value => value * unit);
}

function plainTicks(most, count) {
  if (!(most > 0)) return [0];
  const rough = most / count, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(factor => factor * power).find(value => value >= rough);
  const ticks = [];
  for (let at = 0; at * step <= most * 1.0001; at += 1) ticks.push(at * step);
  return ticks;
}

/** Horizontal lines with their bytes at the left. */
function drawByteAxis(context, plot, most) {
  context.fillStyle = styleColor("quiet");
  context.strokeStyle = styleColor("line");
  context.lineWidth = 1;
  context.textAlign = "right";
  context.textBaseline = "middle";
  for (const tick of byteTicks(most, Math.max(2, Math.floor(plot.height / 48)))) {
    const y = Math.round(plot.y(tick)) + 0.5;
    context.beginPath();
    context.moveTo(plot.left, y);
    context.lineTo(plot.right, y);
    context.stroke();
    context.fillText(bytesText(tick), plot.left - 8, y);
  }
}

/** Milliseconds below a chart whose `plot.x` takes seconds. */
function drawTimeAxis(context, plot, end, y) {
  context.fillStyle = styleColor("quiet");
  context.textAlign = "center";
  for (const tick of plainTicks(end * 1e3, 7)) {
    if (plot.x(tick / 1e3) < plot.right - 20) context.fillText(`${Number(tick.toPrecision(4))} ms`, plot.x(tick / 1e3), y);
  }
}

function drawDashed(context, [x0, y0], [x1, y1], color, dash = [5, 4]) {
  context.save();
  context.strokeStyle = color;
  context.lineWidth = 1.5;
  context.setLineDash(dash);
  context.beginPath();
  context.moveTo(x0, y0);
  context.lineTo(x1, y1);
  context.stroke();
  context.restore();
}

/** The top of an axis: the budget's bytes are in sight unless they are far above what is drawn. */
function axisTop(most, budget) {
  return Math.max(most, budget && budget <= 2.5 * most ? budget : 0) || 1;
}

/** The budget as a line at its bytes, or a note at the top that it is beyond. */
function drawBudgetLine(context, plot, budget, top, align = "left") {
  if (budget === null || budget === undefined) return;
  const x = align === "left" ? plot.left + 8 : plot.right - 6;
  if (budget > top) {
    drawLabel(context, `budget ${bytesText(budget)}, far above ↑`, x, plot.y(top * 1.04) + 4, styleColor("alarm"), align);
    return;
  }
  drawDashed(context, [plot.left, plot.y(budget)], [plot.right, plot.y(budget)], styleColor("alarm"));
  drawLabel(context, `budget ${bytesText(budget)}`, x, plot.y(budget) - 9, styleColor("alarm"), align);
}

/** A line of text on a patch of the ground, so that it can be read over what is drawn below. */
function drawLabel(context, text, x, y, color, align = "left") {
  context.save();
  context.textAlign = align;
  context.textBaseline = "middle";
  const width = context.measureText(text).width;
  const left = align === "right" ? x - width : align === "center" ? x - width / 2 : x;
  context.globalAlpha = 0.85;
  context.fillStyle = styleColor("ground");
  context.fillRect(left - 3, y - 8, width + 6, 16);
  context.globalAlpha = 1;
  context.fillStyle = color;
  context.fillText(text, x, y);
  context.restore();
}
