// Colours for canvases, which cannot use the style sheet: light or dark, as the reader has it.

const darkScheme = window.matchMedia("(prefers-color-scheme: dark)");
const CATEGORIES = {
  light: ["#4472b8", "#e58a2b", "#4f9e57", "#c9504e", "#8a6bb5", "#45a6a8", "#c7a41e", "#b5678f", "#7d6a58", "#7fb3e0",
    "#a5c66b", "#d9a38f"],
  dark: ["#6d9ce0", "#f0a558", "#76bf7c", "#e57f7b", "#ab90d6", "#63bfc0", "#dabf4d", "#d48db3", "#a8937f", "#9cc7ec",
    "#bad98b", "#e6bdab"],
};
const FATE_COLORS = { saved: 0, hoisted: 4, recomputed: 1, replayed: 6, tiled: 5, offloaded: 3, gradient: 2, incoming: 7, backward: 8 };
const ACTION_COLORS = { F: 0, R: 1, B: 2, I: 10, W: 5 };
const COPY_COLORS = { weights: 4, gradients: 7, values: 3 };

function categoryColor(index) {
  const colors = CATEGORIES[darkScheme.matches ? "dark" : "light"];
  return index < colors.length ? colors[index] : `hsl(${Math.round(index * 137.5) % 360} 40% 55%)`;
}

function restColor() {
  return darkScheme.matches ? "#565e69" : "#b9c0c9";
}

function fateColor(fate) {
  return fate in FATE_COLORS ? categoryColor(FATE_COLORS[fate]) : restColor();
}

function actionColor(kind) {
  return categoryColor(ACTION_COLORS[kind]);
}

function copyColor(what) {
  return categoryColor(COPY_COLORS[what]);
}

function styleColor(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}
