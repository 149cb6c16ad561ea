// Devices of a pipeline as rows: all of them, or as many as can be read, chosen in a picture of all their peaks.

const DEVICES_AT_ONCE = 32;
const FEW_DEVICES = 16; // rows are tall

/** Height of a row, of those that are drawn: devices that are few have taller ones. */
function rowHeight(count, tall, low) {
  return count <= FEW_DEVICES ? tall : low;
}

/** Bars of each device in the order in which they run. */
function barsByDevice(bars, count) {
  const rows = Array.from({ length: count }, () => []);
  for (const bar of bars) rows[bar.device].push(bar);
  for (const row of rows) row.sort((a, b) => a.start - b.start);
  return rows;
}

/**
 * The devices that are drawn: `count` from `first()` on.
 *
 * @param peaks bytes of each device
 * @param budget bytes, or null
 * @param changed called when others are chosen
 * @param title of the picture
 */
function deviceWindow(peaks, budget, changed, title = "peak of each device, predicted") {
  const count = Math.min(peaks.length, DEVICES_AT_ONCE);
  const last = peaks.length - count;
  let first = 0;
  const all = { count, first: () => first, list: () => Array.from({ length: count }, (_, at) => first + at), reach, box: "", redraw: () => {} };
  if (!last) return all;

  const most = axisTop(Math.max(...peaks), budget);
  const chosen = element("p", { class: "note devices", "aria-live": "polite" });
  const chart = drawing("Peak of each device", 110, (context, width, tall) => {
    const plot = { left: 74, right: width - 8, height: tall - 26, y: bytes => tall - 18 - bytes / (most * 1.08) * (tall - 26) };
    const wide = (plot.right - plot.left) / peaks.length, bottom = plot.y(0);
    drawByteAxis(context, plot, most);
    context.fillStyle = styleColor("accent-soft");
    context.fillRect(plot.left + first * wide, 4, count * wide, bottom - 4);
    peaks.forEach((bytes, device) => {
      context.fillStyle = device >= first && device < first + count ? categoryColor(0) : restColor();
      context.fillRect(plot.left + device * wide, plot.y(bytes), Math.max(wide - (wide > 4 ? 1 : 0), 0.5), bottom - plot.y(bytes));
    });
    drawBudgetLine(context, plot, budget, most, "right");
    context.fillStyle = styleColor("quiet");
    context.textAlign = "center";
    for (const tick of plainTicks(peaks.length - 1, Math.min(peaks.length - 1, 12))) {
      if (Number.isInteger(tick) && tick < peaks.length) context.fillText(`${tick}`, plot.left + (tick + 0.5) * wide, tall - 7);
    }
  });
  const { canvas } = chart;
  canvas.setAttribute("role", "slider");
  canvas.setAttribute("aria-valuemin", 0);
  canvas.setAttribute("aria-valuemax", last);

  function show(device) {
    first = Math.min(last, Math.max(0, Math.round(device)));
    canvas.setAttribute("aria-valuenow", first);
    canvas.setAttribute("aria-valuetext", `devices ${first} to ${first + count - 1}`);
    chosen.textContent = `Devices ${first} to ${first + count - 1} of ${peaks.length.toLocaleString("en")} are drawn: click here, or use the arrow keys, for others.`;
    chart.redraw();
  }

  function move(device) {
    const before = first;
    show(device);
    if (first !== before) changed();
  }

  function reach(device) {
    if (device < first) move(device);
    else if (device >= first + count) move(device - count + 1);
  }

  canvas.addEventListener("click", event => {
    const device = (event.offsetX - 74) / (canvas.clientWidth - 82) * peaks.length;
    move(Math.floor(device) - count / 2);
  });
  canvas.addEventListener("keydown", event => {
    const moves = { ArrowLeft: first - 1, ArrowRight: first + 1, PageUp: first - count, PageDown: first + count, Home: 0, End: last };
    if (!(event.key in moves)) return;
    move(moves[event.key]);
    event.preventDefault();
  });
  show(0);
  return { ...all, box: element("div", { class: "block" }, element("h2", {}, title), chart.box, chosen), redraw: chart.redraw };
}

/** A name at the left of a row. */
function drawDeviceName(context, device, y) {
  context.fillStyle = styleColor("quiet");
  context.textAlign = "right";
  context.fillText(`device ${device}`, 66, y);
}

/**
 * Memory of devices over the step, a row for each, all to one scale of bytes and one of time.
 *
 * @param label what it shows, for those who do not see it
 * @param window the devices that are drawn
 * @param steps gives what is drawn, the first filled and others as lines: each with `of(device)`, which gives start, end
 *     and bytes of its steps, `end` in seconds, `name`, `color()`
 * @param most bytes at the top of a row; with the budget and, where they are marked, the peaks
 */
function deviceMemoryRows(label, window, steps, { most, budget, peaks }) {
  const high = rowHeight(window.count, 58, 36);
  return drawing(label, window.count * high + 40, (context, width) => {
    const found = steps();
    const end = found.reduce((latest, one) => Math.max(latest, one.end), 0) || 1;
    const x = seconds => 74 + seconds / end * (width - 82);
    context.textBaseline = "middle";
    let left = 74;
    for (const { name, color } of found) {
      drawLabel(context, `▬ ${name}`, left, 8, color());
      left += context.measureText(`▬ ${name}`).width + 16;
    }
    window.list().forEach((device, row) => {
      const bottom = 20 + (row + 1) * high - 4, y = bytes => bottom - bytes / most * (high - 8);
      context.fillStyle = styleColor("sunken");
      context.fillRect(74, bottom, width - 82, 1);
      found.forEach((one, place) => (place ? lineSteps : fillSteps)(context, one.of(device), x, y, one.color()));
      if (budget !== null && budget <= most) drawDashed(context, [74, y(budget)], [width - 8, y(budget)], styleColor("alarm"));
      if (peaks) {
        drawDashed(context, [74, y(peaks[device])], [width - 8, y(peaks[device])], styleColor("quiet"), [2, 3]);
        if (high > 50) drawLabel(context, `peak ${bytesText(peaks[device])}`, 82, y(peaks[device]) + 9, styleColor("text"));
      }
      drawDeviceName(context, device, bottom - high / 2 + 6);
    });
    drawTimeAxis(context, { right: width, x }, end, 20 + window.count * high + 10);
  });
}

function fillSteps(context, steps, x, y, color) {
  context.fillStyle = color;
  context.globalAlpha = 0.75;
  for (const [start, end, bytes] of steps) context.fillRect(x(start), y(bytes), Math.max(x(end) - x(start), 1), y(0) - y(bytes));
  context.globalAlpha = 1;
}

function lineSteps(context, steps, x, y, color) {
  context.strokeStyle = color;
  context.lineWidth = 1.5;
  context.beginPath();
  for (const [start, end, bytes] of steps) {
    context.lineTo(x(start), y(bytes));
    context.lineTo(x(end), y(bytes));
  }
  context.stroke();
}
