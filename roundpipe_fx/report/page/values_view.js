// The view of values: every value with what happens to it and what the alternative would cost.

function valuesView(data, { openMoment }) {
  const shownFates = new Set(Object.keys(FATES));
  const panel = element("div", { class: "panel", "aria-live": "polite" });
  const count = element("span", { class: "hint", id: "values-count" });
  const search = element("input", {
    type: "search", placeholder: "search: name, module, type, line   /", "aria-label": "Search values",
    oninput: () => refresh(),
  });
  const texts = new Map(data.values.map(value =>
    [value, [value.name, value.module, value.type, value.line, value.fate, fateText(value.fate), value.emittedText, value.reason].join("\n").toLowerCase()]));
  const table = virtualTable({
    label: "Values of the plan", height: Math.max(360, window.innerHeight - 250), sort: ["bytes", true],
    select: show, open: value => value.lifetimes.length && openMoment(value.lifetimes[0].first),
    columns: [
      { key: "name", title: "value", width: 170, mono: true, text: value => value.name },
      { key: "fate", title: "fate", width: 124, text: value => fateText(value.fate), mark: value => fateColor(value.fate) },
      { key: "bytes", title: "bytes", width: 104, number: true, text: value => bytesText(value.bytes), order: value => value.bytes },
      { key: "price", title: "recomputing takes", width: 152, number: true, order: value => value.price ?? -1,
        text: value => value.price === null ? "" : millisecondsText(value.price) },
      { key: "rate", title: "ms per GiB", width: 110, number: true, order: rate, text: value => rate(value) < 0 ? "" : rate(value).toFixed(2) },
      { key: "times", title: "times", width: 70, number: true, text: value => value.times ? String(value.times) : "", order: value => value.times },
      { key: "module", title: "module", width: 230, text: value => value.module },
      { key: "type", title: "type", width: 190, mono: true, text: value => value.type },
      { key: "stage", title: "stage", width: 60, number: true, text: value => value.stage === null ? "" : String(value.stage), order: value => value.stage ?? -1 },
      { key: "line", title: "your line", width: 180, mono: true, text: value => value.line },
      { key: "emitted", title: "emitted code", width: 240, mono: true, text: value => value.emittedText },
    ],
  });

  /** Milliseconds of recomputation that a GiB costs which is not saved. */
  function rate(value) {
    return value.price === null || !value.bytes ? -1 : value.price * 1e3 / (value.bytes / 2 ** 30);
  }

  const chips = element("div", { class: "chips", role: "group", "aria-label": "What happens" },
    Object.keys(FATES).map(fate => {
      const own = data.values.filter(value => value.fate === fate);
      if (!own.length) return null;
      const button = element("button", { type: "button", "aria-pressed": "true", title: FATES[fate], onclick: () => {
        if (shownFates.has(fate)) shownFates.delete(fate); else shownFates.add(fate);
        button.setAttribute("aria-pressed", String(shownFates.has(fate)));
        refresh();
      } }, swatch(fateColor(fate)), fateText(fate), " ", element("span", { class: "hint" }, own.length.toLocaleString("en")));
      darkScheme.addEventListener("change", () => { button.firstChild.style.background = fateColor(fate); });
      return button;
    }));

  function refresh() {
    const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = data.values.filter(value => shownFates.has(value.fate) && words.every(word => texts.get(value).includes(word)));
    count.textContent = `${countText(found.length, "value")}, ${bytesText(found.reduce((sum, { bytes }) => sum + bytes, 0))}`;
    table.show(found);
  }

  function show(value) {
    const { moments } = data;
    const meter = element("div", { class: "meter", title: "when it is alive in the step" }, value.lifetimes.map(({ first, last }) => {
      const part = element("i", {});
      part.style.left = `${100 * first / moments.length}%`;
      part.style.width = `${100 * (last + 1 - first) / moments.length}%`;
      return part;
    }));
    panel.replaceChildren(
      element("h2", { class: "mono" }, value.name),
      facts([
        ["fate", element("span", {}, swatch(fateColor(value.fate)), ` ${fateText(value.fate)}: ${FATES[value.fate]}`)],
        ["why", value.reason], ["bytes", `${bytesText(value.bytes)} (${value.bytes.toLocaleString("en")})`], ["type", value.type],
        ["module", value.module], ["stage", value.stage === null ? "" : String(value.stage)], ["alternative", alternativeText(value)],
        ["alive", value.lifetimes.length || value.fate === "tiled" || !moments.length ? "" : "with the value that it is a view of"],
      ]),
      value.lifetimes.length ? element("div", { class: "block" }, meter, element("div", { class: "bar" }, value.lifetimes.map(({ name, first, last }, at) =>
        element("button", { class: "button", type: "button", onclick: () => openMoment(first) }, `${at ? "again" : "alive"} ${first + 1} – ${last + 1}`)))) : "",
      value.line ? code(`yours, ${value.line}`, data.source[value.line] || "") : "",
      ...value.emitted.map(({ file, line, text, modules }) => code(`emitted, ${file}:${line}${sharedText(modules)}`, text)));
  }

  function openValue(value) {
    search.value = "";
    for (const fate of Object.keys(FATES)) shownFates.add(fate);
    for (const button of chips.children) button.setAttribute("aria-pressed", "true");
    refresh();
    table.find(value);
  }

  const section = element("section", { "aria-label": "Values" },
    element("div", { class: "bar" }, search, chips, element("span", { class: "spring" }), count),
    element("div", { class: "split" }, table.box, panel));
  panel.append(element("p", { class: "note" }, "Choose a value to see when it is alive, what the alternative would cost, and its lines. Enter opens the moment at which it is made."));
  refresh();
  return { section, focus: search, shown: refresh, openValue, search };
}

/** What is said of a line of stages that are alike: they are one text, with the names of the first one. */
function sharedText(modules) {
  return modules > 1 ? `, the code of ${modules} stages that are alike, with the names of the first one` : "";
}

function alternativeText({ fate, price, bytes, seconds }) {
  if (price === null) return fate === "tiled" ? `as a whole it would hold ${bytesText(bytes)}; all tiles take ${millisecondsText(seconds)}` : "";
  if (fate === "saved") return `recomputing it instead would take ${millisecondsText(price)}`;
  if (fate === "offloaded") return `recomputing it instead would take ${millisecondsText(price)}`;
  if (fate === "hoisted") return "none: its operation must not run twice";
  return `recomputing it takes ${millisecondsText(price)}; saving it instead would hold ${bytesText(bytes)}`;
}
