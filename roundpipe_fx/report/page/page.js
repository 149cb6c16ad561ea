// The page: header, tabs, and the views of one plan or two.

const plans = JSON.parse(document.getElementById("plans").textContent).map(readPlan);
const main = document.getElementById("main");
const tabs = document.getElementById("tabs");
let current = 0, views = [], opened = null;

function headerOf(data) {
  const { plan } = data;
  const [segments, different] = plan.segments;
  const kind = !plan.training ? "inference" : plan.budget === null ? `training, recompute=${plan.recompute}` : "training within a budget";
  const notes = [`${countText(plan.stages.length, "stage")} of ${countText(segments, "segment")} (${different} different), ${kind}`];
  const bounds = sizes => Object.entries(sizes).map(([name, size]) => `${name} ≤ ${size}`).join(", ");
  if (plan.pipeline) notes.push(`pipelined on ${countText(plan.pipeline.devices.length, "device")}`);
  if (Object.keys(plan.sizes).length) notes.push(`made for sizes up to ${bounds(plan.sizes)}`);
  if (Object.keys(plan.assumed).length) notes.push(`depends on data: ${bounds(plan.assumed)}`);
  if (plan.gathered_bytes) notes.push(`beside the budget, to gather parameters: ${bytesText(plan.gathered_bytes)}`);
  if (plan.bucket_bytes) notes.push(`outside of steps, buckets of DistributedDataParallel: ${bytesText(plan.bucket_bytes)}`);
  if (plan.library_bytes) notes.push(`beside the peak, kept by libraries: ${bytesText(plan.library_bytes)}`);
  if (plan.tiles.length) notes.push(`${countText(plan.tiles.length, "region")} in tiles`);
  const figures = [
    [plan.pipeline ? "peak of a device" : "peak of a step", bytesText(data.peak), plan.budget === null ? "" : `${shareText(data.peak, plan.budget)} of ${bytesText(plan.budget)}`],
    plan.training ? ["saved for the backward", bytesText(data.savedBytes), ""] : null,
    plan.training ? ["recomputed, modelled", millisecondsText(data.recomputeSeconds), `${shareText(data.recomputeSeconds, data.forwardSeconds)} of the forward`] : null,
    ["forward, modelled", millisecondsText(data.forwardSeconds), plan.rates],
  ].filter(Boolean);
  return [
    element("div", { class: "title" }, element("h1", {}, data.name), element("p", {}, notes.join("; "))),
    element("dl", { class: "figures" }, figures.map(([name, value, more]) =>
      element("div", {}, element("dt", {}, name), element("dd", {}, value, more ? element("small", {}, ` ${more}`) : null)))),
  ];
}

/** The views that a plan has something to show in, by the name of their tab. */
function viewsOf(data) {
  const found = [];
  const values = valuesView(data, { openMoment: moment => { open("Memory"); find("Memory").chart.choose(moment); } });
  const find = name => found.find(view => view.name === name).view;
  if (data.moments.length) found.push({ name: "Memory", view: memoryView(data, { openValue: value => { open("Values"); values.openValue(value); } }) });
  found.push({ name: "Values", view: values });
  if (data.plan.frontier.length) found.push({ name: "Frontier", view: frontierView(data) });
  if (data.plan.pipeline) found.push({ name: "Pipeline", view: pipelineView(data) });
  if (plans.length > 1) found.push({ name: "Side by side", view: compareView(...plans) });
  return found;
}

function open(name) {
  opened = (views.find(view => view.name === name) || views[0]).name;
  for (const { name: own, view, tab } of views) {
    tab.setAttribute("aria-selected", String(own === opened));
    tab.tabIndex = own === opened ? 0 : -1;
    view.section.hidden = own !== opened;
  }
  views.find(view => view.name === opened).view.shown();
}

function showPlan(index) {
  current = index;
  document.getElementById("header").replaceChildren(...headerOf(plans[index]));
  views = viewsOf(plans[index]);
  for (const view of views) {
    const id = view.name.toLowerCase().replace(/ /g, "-");
    view.tab = element("button", { type: "button", role: "tab", id: `tab-${id}`, "aria-controls": `view-${id}`, onclick: () => open(view.name) }, view.name);
    view.view.section.id = `view-${id}`;
    view.view.section.setAttribute("role", "tabpanel");
    view.view.section.setAttribute("aria-labelledby", `tab-${id}`);
  }
  const switcher = plans.length > 1 ? [element("span", { class: "spring" }), element("span", { class: "plans" }, "plan",
    choice("plan", plans.map(({ name }, at) => [at, name]), current, showPlan))] : [];
  tabs.replaceChildren(...views.map(({ tab }) => tab), ...switcher);
  main.replaceChildren(...views.map(({ view }) => view.section));
  open(opened || (plans.length > 1 ? "Side by side" : views[0].name));
}

tabs.addEventListener("keydown", event => {
  const at = views.findIndex(({ tab }) => tab === document.activeElement);
  const moves = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: views.length - 1 };
  if (at < 0 || !(event.key in moves)) return;
  const next = views[(moves[event.key] + views.length) % views.length];
  open(next.name);
  next.tab.focus();
  event.preventDefault();
});
document.addEventListener("keydown", event => {
  if (event.key !== "/" || event.target instanceof HTMLInputElement) return;
  open("Values");
  views.find(view => view.name === "Values").view.search.focus();
  event.preventDefault();
});

showPlan(0);
document.body.dataset.ready = "true";
