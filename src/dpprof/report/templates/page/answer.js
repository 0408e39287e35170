// The report's first lines and its first sections, as report.md has them.

function showBlock(block) {
  if (block.kind === "paragraph") return make("p", {}, block.text);
  if (block.kind === "bullets") return make("ul", {}, ...block.items.map((item) => make("li", {}, item)));
  if (block.kind !== "table") return null; // pictures: the views draw the same data
  const columns = block.header.map((title, at) => ({ name: String(at), title, numeric: block.numeric[at], scope: at === 0, text: visible }));
  const number = (text) => (/^[\d,.]+$/.test(text) ? Number(text.replaceAll(",", "")) : text);
  const rows = block.rows.map((row) => Object.fromEntries(row.map((text, at) => [at, text])));
  const sortable = rows.map((row) => ({ ...row, ...Object.fromEntries(block.numeric.flatMap((is, at) => (is ? [[at, number(row[at])]] : []))) }));
  const shown = new Map(sortable.map((row, at) => [row, rows[at]]));
  for (const [at, column] of columns.entries()) column.text = (_, row) => visible(shown.get(row)[at]);
  const csv = () => block.rows.map((row) => Object.fromEntries(row.map((text, at) => [`${at + 1} ${block.header[at]}`, text])));
  return make("div", {}, makeTable(block.caption, columns, sortable), csvButton("answer", csv));
}

function showAnswer() {
  const top = document.getElementById("top");
  const lines = [content.question, ...content.headline].filter(Boolean);
  top.append(make("h1", {}, content.title), ...lines.map((text) => make("p", {}, text)));
  const [first, ...others] = content.answer;
  if (!first) return;
  const view = addView("answer", first.title);
  view.append(...first.blocks.map(showBlock).filter(known));
  for (const section of others) view.append(make("h3", {}, section.title), ...section.blocks.map(showBlock).filter(known));
  if (content.thinned.length) {
    view.append(make("div", { class: "thinned" }, make("p", {}, "What this page leaves out:"),
      make("ul", {}, ...content.thinned.map((text) => make("li", {}, text)))));
  }
}
