// The report's first lines and its sections, as report.md has them.

function showBlock(block) {
  if (block.kind === "paragraph") return make("p", {}, block.text);
  if (block.kind === "bullets") return make("ul", {}, ...block.items.map((item) => make("li", {}, item)));
  if (block.kind === "picture") return showPicture(block);
  const columns = block.header.map((title, at) => ({ name: String(at), title, numeric: block.numeric[at], scope: at === 0, text: (_, row) => visible(row.texts[at]) }));
  const key = (text, at) => (block.numeric[at] && /^[\d,.]+$/.test(text) ? Number(text.replaceAll(",", "")) : text);
  const rows = block.rows.map((texts) => ({ ...texts.map(key), texts }));
  const csv = () => block.rows.map((row) => Object.fromEntries(row.map((text, at) => [`${at + 1} ${block.header[at]}`, text])));
  return make("div", {}, makeTable(block.caption, columns, rows), csvButton("answer", csv));
}

function showPicture({ name, said, caption }) {
  if (!content.figures[name]) return null;
  const picture = make("img", { src: `data:image/png;base64,${content.figures[name]}`, alt: visible(said || caption) });
  picture.addEventListener("load", () => picture.classList.toggle("wide", picture.naturalWidth > 900));
  const frame = make("div", { class: "frame", tabindex: "0", role: "group", "aria-label": `Figure ${name}` }, picture);
  return make("figure", { class: "picture" }, said ? make("p", {}, said) : null, frame, make("figcaption", {}, caption));
}

const showBlocks = (section) => section.blocks.map(showBlock).filter(known);

// The sections behind the first page.
function showFigures() {
  const sections = content.sections.slice(2).map((section) => [section.title, showBlocks(section)]).filter(([, blocks]) => blocks.length);
  if (!sections.length) return;
  const drawn = sections.some(([, blocks]) => blocks.some((block) => block.matches("figure")));
  const view = addView("figures", drawn ? "Figures, and limits" : "Limits", drawn ? "As in report.pdf; the views below have more, and can be played with." : "As in report.pdf.");
  for (const [title, blocks] of sections) view.append(make("h3", {}, title), ...blocks);
}

function showAnswer() {
  const top = document.getElementById("top");
  const lines = [content.question, ...content.headline].filter(Boolean);
  top.append(make("h1", {}, content.title), ...lines.map((text) => make("p", { class: text === content.question ? null : "answer" }, text)));
  const [first, ...others] = content.sections.slice(0, 2);
  if (!first) return;
  const view = addView("answer", first.title);
  view.append(...showBlocks(first));
  for (const section of others) view.append(make("h3", {}, section.title), ...showBlocks(section));
  if (content.thinned.length) {
    view.append(make("div", { class: "thinned" }, make("p", {}, "What this page leaves out:"),
      make("ul", {}, ...content.thinned.map((text) => make("li", {}, text)))));
  }
}
