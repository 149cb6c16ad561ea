// Copies between the devices of an offloaded model and the host: two lanes a device, one for each direction of its link.

const COPIED = { weights: "weights", gradients: "gradients", values: "values that leave, and come back" };

/**
 * @param copies as `copiesOf` returns them
 * @param bars of the timeline above, so that both have one scale
 * @param devices the window of devices that are drawn
 * @param select called with the copy that is chosen
 */
function copiesChart(copies, bars, devices, select) {
  const end = [...bars, ...copies].reduce((latest, one) => Math.max(latest, one.end), 0) || 1;
  const lanes = new Map();
  for (const copy of copies) {
    const key = `${copy.device} ${copy.toHost}`;
    if (!lanes.has(key)) lanes.set(key, []);
    lanes.get(key).push(copy);
  }
  for (const lane of lanes.values()) lane.sort((a, b) => a.start - b.start);
  const laneOf = ({ device, toHost }) => lanes.get(`${device} ${toHost}`) || [];
  const shown = () => devices.list().flatMap(device => [false, true].map(toHost => ({ device, toHost })));
  const height = rowHeight(devices.count, 20, 13);
  const legend = element("ul", { class: "legend" });
  let chosen = null, plot = null;

  const chart = drawing("Copies between host and devices, predicted", 2 * devices.count * height + 26, (context, width, tall) => {
    plot = { left: 74, right: width - 8, x: seconds => 74 + seconds / end * (width - 82) };
    context.textBaseline = "middle";
    shown().forEach((lane, row) => drawLane(context, lane, row));
    drawTimeAxis(context, plot, end, tall - 10);
  });
  const { canvas } = chart;

  function drawLane(context, lane, row) {
    const top = row * height + 1.5, high = height - 3;
    context.fillStyle = styleColor("quiet");
    context.textAlign = "right";
    context.fillText(`${lane.device} ${lane.toHost ? "→ host" : "← host"}`, 66, top + high / 2);
    context.fillStyle = styleColor("sunken");
    context.fillRect(plot.left, top, plot.right - plot.left, high);
    for (const copy of laneOf(lane)) {
      const left = plot.x(copy.start), wide = Math.max(plot.x(copy.end) - left, 1);
      context.fillStyle = copyColor(copy.what);
      context.fillRect(left, top, wide > 3 ? wide - 1 : wide, high);
      if (copy !== chosen) continue;
      context.strokeStyle = styleColor("text");
      context.lineWidth = 2;
      context.strokeRect(left, top, wide, high);
    }
  }

  /** The copy under a place, or the nearest one in its lane within a few pixels: copies can be narrow. */
  function copyAt(px, py) {
    const lane = shown()[Math.floor(py / height)];
    if (!lane) return null;
    const away = copy => Math.max(plot.x(copy.start) - px, px - plot.x(copy.end), 0);
    const nearest = laneOf(lane).reduce((best, copy) => !best || away(copy) < away(best) ? copy : best, null);
    return nearest && away(nearest) <= 4 ? nearest : null;
  }

  function choose(copy) {
    if (!copy) return;
    chosen = copy;
    devices.reach(copy.device);
    canvas.setAttribute("aria-label", `Copies between host and devices, predicted: ${textOf(copy)}`);
    chart.redraw();
    select(copy);
  }

  function textOf({ what, toHost, device, bytes, start, end: over }) {
    return `${bytesText(bytes)} of ${what} ${toHost ? `from device ${device} to the host` : `to device ${device}`} · ${millisecondsText(over - start)}`;
  }

  function showLegend() {
    legend.replaceChildren(...Object.keys(COPIED).filter(what => copies.some(copy => copy.what === what)).map(what => {
      const own = copies.filter(copy => copy.what === what && (copy.toHost || what === "weights"));
      return element("li", {}, swatch(copyColor(what)), element("span", {}, COPIED[what], " ",
        element("span", { class: "size" }, bytesText(own.reduce((sum, { bytes }) => sum + bytes, 0)))));
    }));
  }

  canvas.addEventListener("click", event => choose(copyAt(event.offsetX, event.offsetY)));
  canvas.addEventListener("pointermove", event => {
    const copy = plot && copyAt(event.offsetX, event.offsetY);
    chart.showTip(event.offsetX, event.offsetY, copy && textOf(copy));
  });
  canvas.addEventListener("pointerleave", () => chart.showTip(0, 0, ""));
  canvas.addEventListener("keydown", event => {
    if (!["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown"].includes(event.key)) return;
    event.preventDefault();
    if (!chosen) { choose(shown().map(lane => laneOf(lane)[0]).find(Boolean)); return; }
    const own = laneOf(chosen), at = own.indexOf(chosen);
    if (event.key === "ArrowLeft") choose(own[Math.max(at - 1, 0)]);
    else if (event.key === "ArrowRight") choose(own[Math.min(at + 1, own.length - 1)]);
    else {
      const up = event.key === "ArrowUp";
      const other = laneOf({ device: chosen.device + (up === chosen.toHost ? 0 : up ? -1 : 1), toHost: !chosen.toHost });
      choose(other.find(copy => copy.end > chosen.start) || other[other.length - 1]);
    }
  });
  darkScheme.addEventListener("change", showLegend);
  showLegend();
  return { ...chart, legend };
}
