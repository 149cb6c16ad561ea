// Numbers for people, and elements without markup: whatever a plan says becomes text, never HTML.

const UNITS = ["B", "KiB", "MiB", "GiB"];

function bytesText(count) {
  let size = Math.abs(count), unit = 0;
  while (size >= 1024 && unit < UNITS.length - 1) { size /= 1024; unit += 1; }
  const sign = count < 0 ? "−" : "";
  return unit === 0 ? `${sign}${Math.round(size)} B` : `${sign}${size.toFixed(1)} ${UNITS[unit]}`;
}

function millisecondsText(seconds) {
  const value = seconds * 1e3;
  return `${value === 0 ? "0" : value.toFixed(Math.abs(value) < 100 ? 3 : 1)} ms`;
}

function shareText(part, whole) {
  return whole ? `${(100 * part / whole).toFixed(1)} %` : "";
}

function countText(count, noun) {
  return `${count.toLocaleString("en")} ${noun}${count === 1 ? "" : "s"}`;
}

/** The path of a module with `*` in place of numbers, as the plan's summary has it. */
function folded(module) {
  return module.replace(/(?<![^. ])\d+(?![^. ])/g, "*");
}

/** An element: attributes, `on…` handlers and `class`, then children, of which strings become text. */
function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) made.setAttribute(name, value);
  }
  made.append(...children.flat(Infinity).filter(child => child !== null && child !== undefined && child !== ""));
  return made;
}

function swatch(color) {
  const made = element("span", { class: "swatch" });
  made.style.background = color;
  return made;
}

/** Names with their values, as a description list; those without a value are left out. */
function facts(pairs) {
  const shown = pairs.filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return element("dl", { class: "facts" }, shown.flatMap(([name, value]) =>
    [element("dt", {}, name), element("dd", {}, value)]));
}

function code(where, text) {
  return element("pre", { class: "code" }, where ? element("span", { class: "where" }, where) : null, text);
}

/** Buttons of which one is pressed. */
function choice(label, options, chosen, choose) {
  const buttons = options.map(([value, text]) => element("button", {
    type: "button", "aria-pressed": String(value === chosen),
    onclick: () => {
      buttons.forEach((button, at) => button.setAttribute("aria-pressed", String(options[at][0] === value)));
      choose(value);
    },
  }, text));
  return element("span", { class: "choice", role: "group", "aria-label": label }, buttons);
}
