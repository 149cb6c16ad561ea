// The view of a pipeline: what each device runs when, as predicted and measured, its waits, transfers and memory.

const ACTIONS = { F: "forward", R: "recompute", B: "backward", I: "backward of inputs", W: "backward of parameters" };

function pipelineView(data) {
  const { plan } = data;
  const { pipeline, timeline } = plan;
  const shown = [["predicted", "predicted"], ["measured", "measured in the latest step"]]
    .filter(([key]) => timeline && timeline[key].length)
    .map(([key, title]) => ({ key, title, bars: barsOf(timeline[key]) }));
  for (const one of shown) one.rows = barsByDevice(one.bars, pipeline.devices.length);
  const copies = timeline ? copiesOf(timeline, plan.strings) : [];
  const last = copies.reduce((latest, copy) => Math.max(latest, copy.end), 0);
  const devices = deviceWindow(pipeline.peak_bytes, plan.budget, redraw);
  const panel = element("div", { class: "panel", "aria-live": "polite" });
  const charts = shown.map(one => timelineChart(one, pipeline, devices, one.key === "predicted" ? last : 0, show));
  const link = copies.length ? copiesChart(copies, shown[0].bars, devices, showCopy) : null;
  const kinds = Object.keys(ACTIONS).filter(kind => shown.some(({ bars }) => bars.some(bar => bar.kind === kind)));
  const legend = element("ul", { class: "legend" });

  function drawLegend() {
    legend.replaceChildren(...kinds.map(kind => element("li", {}, swatch(actionColor(kind)), element("span", {}, ACTIONS[kind]))),
      element("li", {}, swatch(styleColor("sunken")), element("span", {}, "waiting (bubble)")),
      element("li", {}, element("span", {}, "╱ transfer between devices")));
  }

  function show(bar, row) {
    const counterparts = shown.flatMap(({ key, rows }) => rows[bar.device].filter(one => one.action === bar.action)
      .map(one => [key, `${millisecondsText(one.end - one.start)}, from ${millisecondsText(one.start)}`]));
    const predicted = shown.length ? shown[0].rows[bar.device].find(one => one.action === bar.action) : null;
    const [stage, microbatch] = bar.action.slice(1).split(".");
    const before = row.filter(one => one.end <= bar.start + 1e-12).reduce((latest, { end }) => Math.max(latest, end), 0);
    panel.replaceChildren(
      element("h2", {}, `${ACTIONS[bar.kind]} of stage ${stage}, microbatch ${microbatch}`),
      facts([["device", `${bar.device}: ${pipeline.devices[bar.device] || ""}`], ["stage", plan.stages[stage]?.modules || ""], ...counterparts,
        ["waited before", millisecondsText(Math.max(0, bar.start - before))],
        ["device's memory", predicted && predicted.bytes ? `${bytesText(predicted.bytes)}, predicted` : ""]]));
  }

  function showCopy(copy) {
    const [stage, microbatch] = copy.action.slice(1).split(".");
    const when = copy.toHost ? "begins after" : "is there for";
    panel.replaceChildren(
      element("h2", {}, `${bytesText(copy.bytes)} of ${copy.what} to the ${copy.toHost ? "host" : "device"}`),
      facts([["device", `${copy.device}: ${pipeline.devices[copy.device] || ""}`],
        ["takes", `${millisecondsText(copy.end - copy.start)}, from ${millisecondsText(copy.start)}, predicted`],
        [when, `${ACTIONS[copy.action[0]]} of stage ${stage}, microbatch ${microbatch}`], ["stage", plan.stages[stage]?.modules || ""],
        ["bytes", copy.bytes.toLocaleString("en")],
        ["values", copy.values.map(name => `${name}${data.byName.get(name)?.module ? ` of ${data.byName.get(name).module}` : ""}`).join(", ")]]));
  }

  const memory = shown.length && shown[0].key === "predicted" ? deviceMemoryChart(shown[0].rows, data, devices, last) : null;
  const table = element("div", {});

  function redraw() {
    drawLegend();
    for (const { chart } of charts) chart.redraw();
    if (link) link.redraw();
    if (memory) memory.redraw();
    devices.redraw();
    table.replaceChildren(deviceTable(data, shown, devices.list()));
  }

  const section = element("section", { "aria-label": "Pipeline" },
    element("p", { class: "note" }, `${countText(pipeline.microbatches, "microbatch").replace("microbatchs", "microbatches")} by schedule ${pipeline.schedule} on ${countText(pipeline.devices.length, "device")}`
      + `; a step takes ${millisecondsText(pipeline.makespan)} modelled, of which the devices wait ${(100 * pipeline.bubble).toFixed(1)} %`
      + (pipeline.host_to_device_bytes ? `; ${bytesText(pipeline.host_to_device_bytes)} of the model are copied to the devices` : "")
      + (pipeline.sent_values ? `; ${countText(pipeline.sent_values, "value")} (${bytesText(pipeline.sent_bytes)}) leave for the host and come back` : "") + "."),
    element("div", { class: "split" },
      element("div", { class: "block" }, devices.box, charts.map(({ title, chart }) => [element("h2", {}, title), chart.box]),
        link ? [element("h2", {}, "copies between host and devices, predicted"), link.box, link.legend] : "",
        shown.length ? legend : element("p", { class: "note" }, "This plan has no timeline, or one of too many actions to draw."),
        memory ? [element("h2", {}, "memory of each device while its actions run, predicted"), memory.box] : "", table),
      panel));
  panel.append(element("p", { class: "note" }, "Choose an action, by click or arrow keys, to see its times, what it waited for and the device's memory."));
  darkScheme.addEventListener("change", drawLegend);
  return { section, focus: charts.length ? charts[0].chart.canvas : section, shown: redraw };
}

function timelineChart({ key, title, bars, rows }, pipeline, devices, last, select) {
  const end = bars.reduce((latest, bar) => Math.max(latest, bar.end), last) || 1;
  const transfers = transfersOf(pipeline.order, bars);
  const rowOf = ({ device }) => device - devices.first();
  const drawn = bar => rowOf(bar) >= 0 && rowOf(bar) < devices.count;
  const height = rowHeight(devices.count, 26, 17);
  let chosen = null, plot = null;
  const chart = drawing(`Timeline, ${key}`, devices.count * height + 26, (context, width, tall) => {
    plot = { left: 74, right: width - 8, x: seconds => 74 + seconds / end * (width - 82) };
    context.textBaseline = "middle";
    devices.list().forEach((device, row) => drawDevice(context, device, row));
    drawTransfers(context);
    drawTimeAxis(context, plot, end, tall - 10);
  });
  const { canvas } = chart;

  function drawDevice(context, device, row) {
    const margin = rowHeight(devices.count, 3, 1.5), top = row * height + margin, high = height - 2 * margin;
    drawDeviceName(context, device, top + high / 2);
    context.fillStyle = styleColor("sunken");
    context.fillRect(plot.left, top, plot.right - plot.left, high);
    if (!rows[device].length) drawLabel(context, key === "measured" ? "in another process" : "runs nothing", plot.left + 8, top + high / 2, styleColor("quiet"));
    context.textAlign = "center";
    for (const bar of rows[device]) {
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
    const near = transfers.filter(([from, to]) => drawn(from) || drawn(to));
    for (const [from, to] of near) {
      const own = chosen && (from === chosen || to === chosen);
      if (near.length > 400 && !own) continue;
      context.globalAlpha = own ? 1 : 0.35;
      context.lineWidth = own ? 2 : 1;
      context.beginPath();
      context.moveTo(plot.x(from.end), (rowOf(from) + 0.5) * height);
      context.lineTo(plot.x(to.start), (rowOf(to) + 0.5) * height);
      context.stroke();
    }
    context.restore();
  }

  function barAt(px, py) {
    const own = (Math.floor(py / height) < devices.count && rows[devices.first() + Math.floor(py / height)]) || [];
    return own.find(bar => plot.x(bar.start) <= px && px <= Math.max(plot.x(bar.end), plot.x(bar.start) + 2)) || null;
  }

  function choose(bar) {
    if (!bar) return;
    chosen = bar;
    devices.reach(bar.device);
    canvas.setAttribute("aria-label", `Timeline, ${key}: ${bar.action} on device ${bar.device}, ${millisecondsText(bar.end - bar.start)}`);
    chart.redraw();
    select(bar, rows[bar.device]);
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
    if (!chosen) { choose(rows[devices.first()][0]); return; }
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
function deviceMemoryChart(rows, { plan }, devices, last) {
  const { pipeline } = plan;
  const most = axisTop(Math.max(...pipeline.peak_bytes), plan.budget) * 1.06;
  const end = rows.flat().reduce((latest, bar) => Math.max(latest, bar.end), last);
  const steps = { of: device => rows[device].map(bar => [bar.start, bar.end, bar.bytes]), end, color: () => categoryColor(0), name: "bytes allocated during an action" };
  return deviceMemoryRows("Memory of each device while its actions run, predicted", devices, () => [steps], { most, budget: plan.budget, peaks: pipeline.peak_bytes });
}

function deviceTable({ plan }, shown, devices) {
  const { pipeline } = plan;
  const busy = (rows, device) => rows[device].reduce((sum, bar) => sum + bar.end - bar.start, 0);
  const spans = shown.map(({ key, bars, rows }) => ({ key, rows, whole: key === "predicted" ? pipeline.makespan : bars.reduce((latest, bar) => Math.max(latest, bar.end), 0) }));
  const lines = devices.map(device => element("tr", {},
    element("td", {}, `${device}: ${pipeline.devices[device]}`), element("td", {}, bytesText(pipeline.peak_bytes[device])),
    element("td", {}, plan.budget === null ? "" : shareText(pipeline.peak_bytes[device], plan.budget)),
    spans.flatMap(({ rows, whole }) => !rows[device].length ? [element("td", {}), element("td", {})] : [element("td", {}, millisecondsText(busy(rows, device))), element("td", {}, shareText(whole - busy(rows, device), whole))])));
  return element("table", { class: "plain" },
    element("thead", {}, element("tr", {}, ["device", "peak", plan.budget === null ? "" : "of the budget", ...spans.flatMap(({ key }) => [`busy, ${key}`, `waiting, ${key}`])].map(text => element("th", { scope: "col" }, text)))),
    element("tbody", {}, lines));
}
