// The view of two plans side by side: figures, both curves to one scale, and values that they treat differently.

function compareView(left, right) {
  const plans = [left, right];
  const most = Math.max(...plans.map(({ moments, plan }) => axisTop(moments.reduce((high, { bytes }) => Math.max(high, bytes), 0), plan.pipeline ? null : plan.budget)));
  const figures = [
    ["peak", data => data.peak, bytesText],
    ["budget", data => data.plan.budget, bytesText],
    ["saved for the backward", data => data.savedBytes, bytesText],
    ["recomputed", data => data.recomputeSeconds, millisecondsText],
    ["forward", data => data.forwardSeconds, millisecondsText],
    ["backward", data => data.backwardSeconds, millisecondsText],
    ["a step of the pipeline", data => data.plan.pipeline ? data.plan.pipeline.makespan : null, millisecondsText],
    ["stages", data => data.plan.stages.length, String, true],
    ["values", data => data.values.length, value => value.toLocaleString("en"), true],
  ].filter(([, of]) => plans.some(data => of(data) !== null));
  const table = element("table", { class: "plain" },
    element("thead", {}, element("tr", {}, ["", left.name, right.name, "difference"].map(text => element("th", { scope: "col" }, text)))),
    element("tbody", {}, figures.map(([name, of, text, neutral]) => {
      const [a, b] = plans.map(of), change = a === null || b === null || Math.abs(b - a) < 1e-6 * Math.abs(a) ? null : b - a;
      return element("tr", {}, element("td", {}, name), element("td", {}, a === null ? "none" : text(a)), element("td", {}, b === null ? "none" : text(b)),
        element("td", { class: neutral ? "" : change > 0 ? "more" : change < 0 ? "less" : "" }, change ? signed(change, text) : ""));
    })));

  const rows = differencesOf(left, right);
  const differing = virtualTable({
    label: "Values that differ", height: 420, sort: ["bytes", true],
    columns: [
      { key: "left", title: left.name, width: 130, text: row => fateText(row.left), mark: row => fateColor(row.left) },
      { key: "right", title: right.name, width: 130, text: row => fateText(row.right), mark: row => fateColor(row.right) },
      { key: "bytes", title: "bytes", width: 104, number: true, text: row => bytesText(row.bytes), order: row => row.bytes },
      { key: "price", title: "recomputing takes", width: 152, number: true, text: row => row.price === null ? "" : millisecondsText(row.price), order: row => row.price ?? -1 },
      { key: "name", title: "value", width: 170, mono: true, text: row => row.name },
      { key: "module", title: "module", width: 240, text: row => row.module },
      { key: "line", title: "your line", width: 190, mono: true, text: row => row.line },
    ],
  });
  differing.show(rows);
  const charts = plans.map(data => {
    const figure = element("p", { class: "note" });
    const chart = memoryChart(data, { height: 230, most, label: `Memory over the step, ${data.name}`, select: moment => {
      const at = data.moments[moment];
      figure.textContent = `${bytesText(at.bytes)} while ${at.value} is computed in ${at.call}${at.module ? `, ${at.module}` : ""}`;
    } });
    return { data, chart, figure };
  });
  const section = element("section", { "aria-label": "Two plans side by side" },
    element("div", { class: "split even" }, charts.map(({ data, chart, figure }) => element("div", { class: "block" },
      element("h2", {}, data.name), chart.box, figure, chart.legend))),
    element("div", { class: "block" }, table, element("h2", { id: "differing-count" }, `${countText(rows.length, "value")} with another fate`), differing.box));
  return { section, focus: charts[0].chart.canvas, shown: () => { for (const { chart } of charts) chart.choose(chart.moment()); differing.show(rows); } };
}

/** Values of the forward that are saved, recomputed or tiled in one plan and not, or differently, in the other. */
function differencesOf(left, right) {
  const relevant = ({ fate }) => !["backward", "gradient", "incoming"].includes(fate);
  const names = new Set([...left.values, ...right.values].filter(relevant).map(({ name }) => name));
  const found = [];
  for (const name of names) {
    const [a, b] = [left.byName.get(name), right.byName.get(name)];
    const fates = [a, b].map(value => value ? value.fate : "absent");
    const either = a || b;
    if (fates[0] !== fates[1]) {
      found.push({ name, left: fates[0], right: fates[1], bytes: either.bytes, price: a?.price ?? b?.price ?? null, module: either.module, line: either.line });
    }
  }
  return found;
}
