// A table of any number of rows, of which only those in sight are elements: sortable, and walked through by keys.

const ROW_HEIGHT = 26;
const BEYOND = 8; // rows above and below those in sight
let tables = 0;

/**
 * @param label what it lists
 * @param columns each with `key`, `title`, `width`, and what is shown: `text(row)`, sorted by `order(row)`; `number`
 *     aligns it right, `mark(row)` gives the colour of a swatch, `mono` is for code
 * @param height in CSS pixels
 * @param sort key of the column it is sorted by, and whether the largest comes first
 * @param select called with the row that is chosen by click or key
 */
function virtualTable({ label, columns, height, sort, select, open }) {
  const total = columns.reduce((sum, { width }) => sum + width, 0);
  const body = element("div", { role: "presentation" });
  body.style.position = "relative";
  const head = element("div", { class: "head", role: "row" });
  const box = element("div", { class: "table", role: "grid", tabindex: "0", "aria-label": label }, head, body);
  box.style.height = `${height}px`;
  const id = `table-${tables += 1}`;
  let rows = [], chosen = -1, [key, descending] = sort;

  const heads = columns.map(column => {
    const button = element("button", { type: "button", tabindex: "-1", title: column.title, onclick: () => sortBy(column.key) });
    const cell = element("div", { class: `cell${column.number ? " number" : ""}`, role: "columnheader" }, button);
    cell.style.width = `${column.width}px`;
    head.append(cell);
    return { column, cell, button };
  });

  function sortBy(asked) {
    if (asked === key) descending = !descending;
    else [key, descending] = [asked, columns.find(column => column.key === asked).number === true];
    order();
    box.scrollTop = 0;
  }

  function order() {
    const row = chosen >= 0 ? rows[chosen] : null;
    const column = columns.find(one => one.key === key);
    const by = column.order || column.text;
    const keys = new Map(rows.map(one => [one, by(one)]));
    const sign = descending ? -1 : 1;
    rows.sort((a, b) => {
      const left = keys.get(a), right = keys.get(b);
      return left < right ? -sign : left > right ? sign : 0;
    });
    chosen = row ? rows.indexOf(row) : -1;
    for (const { column: one, cell, button } of heads) {
      const sorted = one.key === key;
      cell.setAttribute("aria-sort", sorted ? (descending ? "descending" : "ascending") : "none");
      button.textContent = `${one.title}${sorted ? (descending ? " ↓" : " ↑") : ""}`;
    }
    draw();
  }

  function show(found) {
    const row = chosen >= 0 ? rows[chosen] : null;
    rows = [...found];
    chosen = row ? rows.indexOf(row) : -1;
    order();
  }

  function draw() {
    const first = Math.max(0, Math.floor(box.scrollTop / ROW_HEIGHT) - BEYOND);
    const last = Math.min(rows.length, first + Math.ceil(height / ROW_HEIGHT) + 2 * BEYOND);
    body.style.height = `${rows.length * ROW_HEIGHT}px`;
    body.style.width = `${total}px`;
    body.style.minWidth = "100%";
    box.setAttribute("aria-rowcount", rows.length + 1);
    body.replaceChildren(...(rows.length ? [] : [element("div", { class: "none" }, "nothing to show")]));
    for (let at = first; at < last; at += 1) body.append(rowElement(rows[at], at));
  }

  function rowElement(row, at) {
    const made = element("div", {
      class: "row", role: "row", id: `${id}-${at}`, "aria-rowindex": at + 2, "aria-selected": String(at === chosen),
      onclick: () => choose(at), ondblclick: () => open && open(row),
    }, columns.map(column => {
      const text = column.text(row);
      const cell = element("div", {
        class: `cell${column.number ? " number" : ""}${column.mono ? " mono" : ""}`, role: "gridcell", title: text,
      }, column.mark ? swatch(column.mark(row)) : null, text);
      cell.style.width = `${column.width}px`;
      return cell;
    }));
    made.style.top = `${at * ROW_HEIGHT}px`;
    return made;
  }

  function choose(at) {
    if (at < 0 || at >= rows.length) return;
    chosen = at;
    const top = at * ROW_HEIGHT, sight = height - 2 * ROW_HEIGHT;
    if (top < box.scrollTop) box.scrollTop = top;
    else if (top > box.scrollTop + sight - ROW_HEIGHT) box.scrollTop = top - sight + ROW_HEIGHT;
    box.setAttribute("aria-activedescendant", `${id}-${at}`);
    draw();
    if (select) select(rows[at]);
  }

  box.addEventListener("scroll", () => requestAnimationFrame(draw));
  box.addEventListener("keydown", event => {
    const page = Math.floor(height / ROW_HEIGHT) - 2;
    const moves = { ArrowDown: chosen + 1, ArrowUp: chosen - 1, PageDown: Math.min(chosen + page, rows.length - 1),
      PageUp: Math.max(chosen - page, 0), Home: 0, End: rows.length - 1 };
    if (event.key in moves) choose(Math.max(0, moves[event.key]));
    else if (event.key === "Enter" && chosen >= 0 && open && event.target === box) open(rows[chosen]);
    else return;
    event.preventDefault();
  });
  if (darkScheme.addEventListener) darkScheme.addEventListener("change", draw);
  return { box, show, choose, find: row => choose(rows.indexOf(row)), rows: () => rows, sortBy };
}
