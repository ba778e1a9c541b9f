// A table of the island: sorted by any of its columns; cells without a figure come last.

function tableOf(table) {
  const head = element("tr");
  const body = element("tbody");
  let order = { column: -1, down: false };

  const fill = () => {
    const rows = [...table.rows];
    const { column, down } = order;
    if (column >= 0) rows.sort((a, b) => compared(a[column], b[column], down));
    body.replaceChildren(...rows.map((row) => element("tr", {}, ...row.map((cell, place) => cellOf(cell, table.columns[place].unit)))));
  };
  table.columns.forEach(({ label, unit }, column) => {
    const sort = () => {
      order = { column, down: order.column === column ? !order.down : unit !== "text" };
      [...head.children].forEach((each, place) => each.setAttribute("aria-sort", place === column ? (order.down ? "descending" : "ascending") : "none"));
      fill();
    };
    head.append(element("th", { class: unit === "text" ? null : "number", "aria-sort": "none", scope: "col" }, element("button", { type: "button", onclick: sort }, label)));
  });
  fill();
  const scroller = element("div", { class: "scroller", tabindex: 0 }, element("table", { id: `table-${table.id}` }, element("thead", {}, head), body));
  return [element("h3", {}, table.title), element("p", { class: "hint" }, table.note), ...(table.rows.length ? [scroller] : [element("p", {}, "None.")])];
}

function cellOf(cell, unit) {
  return element("td", unit === "text" ? {} : { class: "number" }, formatCell(cell, unit));
}

function compared(a, b, down) {
  if (a === null || b === null) return a === b ? 0 : a === null ? 1 : -1;
  const order = typeof a === "number" ? a - b : String(a).localeCompare(String(b), "en", { numeric: true });
  return down ? -order : order;
}
