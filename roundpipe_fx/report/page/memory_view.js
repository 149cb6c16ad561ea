// The view of memory: the chart, and what is alive at the chosen moment.

function memoryView(data, { openValue }) {
  const panel = element("div", { class: "panel", "aria-live": "polite" });
  const alive = virtualTable({
    label: "Values alive at the chosen moment", height: Math.max(230, window.innerHeight - 670), sort: ["bytes", true], open: row => row.value && openValue(row.value),
    columns: [
      { key: "bytes", title: "bytes", width: 100, number: true, text: row => bytesText(row.bytes), order: row => row.bytes },
      { key: "name", title: "value", width: 200, mono: true, text: row => row.name, mark: row => chart.colorOf(row) },
      { key: "module", title: "module", width: 250, text: row => row.module },
      { key: "fate", title: "fate", width: 110, text: row => row.value ? fateText(row.value.fate) : "" },
      { key: "line", title: "your line", width: 180, mono: true, text: row => row.line },
      { key: "source", title: "what it says", width: 480, mono: true, text: row => data.source[row.line] || "" },
    ],
  });
  const title = element("h2", {});
  const details = element("div", {});
  const count = element("h2", { id: "alive-count" });
  panel.append(title, details);

  function show(moment) {
    const at = data.moments[moment];
    const living = data.lifetimes.filter(({ first, last }) => first <= moment && moment <= last);
    const total = living.reduce((sum, { bytes }) => sum + bytes, 0);
    title.textContent = `${bytesText(at.bytes)} while ${at.value} is computed`;
    const rounding = at.bytes - total - at.workspace;
    details.replaceChildren(facts([
      ["moment", `${moment + 1} of ${data.moments.length}`],
      ["in", at.call],
      ["module", at.module],
      [data.plan.tiles.some(({ loop }) => loop === at.value) ? "for one tile" : "workspace", at.workspace ? bytesText(at.workspace) : ""],
      ["allocator", rounding > 0 ? `${bytesText(rounding)} for rounding` : ""],
    ]), at.line ? code(at.line, data.source[at.line] || "") : "");
    details.className = "block";
    count.textContent = `${countText(living.length, "value")} alive, ${bytesText(total)}`;
    alive.show(living);
  }

  const chart = memoryChart(data, { select: show });
  const section = element("section", { "aria-label": "Memory over the step" },
    element("div", { class: "bar" }, element("span", {}, "stacked by"), choice("stacked by", STACKS, "kind", stacking => { chart.stackBy(stacking); chart.choose(chart.moment()); }),
      element("button", { class: "button", type: "button", onclick: () => chart.zoom(0.5) }, "zoom in"),
      element("button", { class: "button", type: "button", onclick: () => chart.zoom(2) }, "zoom out"),
      element("button", { class: "button", type: "button", onclick: () => chart.choose(chart.highest) }, "go to the peak"),
      element("span", { class: "spring" }),
      element("span", { class: "hint" }, element("kbd", {}, "←"), " ", element("kbd", {}, "→"), " moments, ",
        element("kbd", {}, "shift"), " further, ", element("kbd", {}, "p"), " peak, ", element("kbd", {}, "+"), " ", element("kbd", {}, "−"), " zoom")),
    noteOnPeak(data),
    element("div", { class: "split" }, element("div", { class: "block" }, chart.box, chart.legend), panel),
    element("div", { class: "block" }, element("div", { class: "bar" }, count, element("span", { class: "spring" }),
      element("span", { class: "hint" }, element("kbd", {}, "enter"), " opens a value")), alive.box));
  return { section, focus: chart.canvas, shown: () => { chart.redraw(); if (!title.textContent) chart.choose(chart.highest); }, chart };
}

/** Why the curve's peak is not the plan's, where it is not. */
function noteOnPeak({ plan, moments }) {
  const highest = moments.reduce((most, { bytes }) => Math.max(most, bytes), 0);
  if (plan.pipeline) return element("p", { class: "note" }, "One microbatch that runs alone; the devices' memory with all microbatches in flight is in the view of the pipeline.");
  if (plan.peak.bytes === highest) return null;
  return element("p", { class: "note" }, `One call of this graph. The step's peak is ${bytesText(plan.peak.bytes)}: it makes several calls, whose values are alive at once.`);
}
