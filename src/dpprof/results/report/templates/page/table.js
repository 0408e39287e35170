// Tables that sort and filter. A column is {name, title, text, numeric, scope, cell}.

const PAGE = 100;

function sortRows(rows, name, direction) {
  const missing = (row) => !known(row[name]);
  return [...rows].sort((one, other) => {
    if (missing(one) || missing(other)) return missing(one) - missing(other);
    const [a, b] = [one[name], other[name]];
    const order = typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b), "en");
    return direction * order;
  });
}

function makeTable(caption, columns, rows, { filter = rows.length > 8 } = {}) {
  let [sorted, direction, wanted, shown] = [null, 1, "", PAGE];
  const texts = columns.map((column) => column.text ?? words);
  const searched = rows.map((row) =>
    columns.map(({ name }, at) => `${row[name] ?? ""} ${texts[at](row[name], row)}`).join(" ").toLowerCase(),
  );
  const place = new Map(rows.map((row, at) => [row, at]));
  const body = make("tbody");
  const count = make("span", { class: "count", role: "status" });
  const more = make("button", { type: "button", onclick: () => fill((shown += PAGE * 5)) }, "Show more rows");

  const cellOf = (row) => (column, at) => {
    const { name, numeric, scope, cell } = column;
    const inside = cell ? cell(row) : texts[at](row[name], row);
    return make(scope ? "th" : "td", { scope: scope ? "row" : null, class: numeric ? "number" : null }, inside);
  };
  function fill() {
    const terms = wanted.toLowerCase().split(/\s+/).filter(Boolean);
    const kept = rows.filter((row) => terms.every((term) => searched[place.get(row)].includes(term)));
    const ordered = sorted ? sortRows(kept, sorted, direction) : kept;
    body.replaceChildren(
      ...ordered.slice(0, shown).map((row) => make("tr", {}, ...columns.map((column, at) => cellOf(row)(column, at)))),
    );
    count.textContent = `${fixed(kept.length)} of ${fixed(rows.length)} rows`;
    more.hidden = kept.length <= shown;
  }
  const heads = columns.map((column) => {
    const button = make("button", { type: "button" }, column.title);
    const head = make("th", { scope: "col", "aria-sort": "none", class: column.numeric ? "number" : null }, button);
    button.addEventListener("click", () => {
      direction = sorted === column.name ? -direction : 1;
      sorted = column.name;
      for (const other of heads) other.setAttribute("aria-sort", "none");
      head.setAttribute("aria-sort", direction > 0 ? "ascending" : "descending");
      fill();
    });
    return head;
  });
  const id = newId("filter");
  const input = make("input", { id, type: "search", placeholder: "words, all of which must occur" });
  input.addEventListener("input", () => {
    [wanted, shown] = [input.value, PAGE];
    fill();
  });
  const search = filter ? make("p", { class: "tools" }, make("label", { for: id }, "Filter"), input, count) : null;
  fill();
  const scroll = make("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
    make("table", {}, make("caption", {}, caption), make("thead", {}, make("tr", {}, ...heads)), body));
  return make("div", { class: "table" }, search, scroll, more);
}
