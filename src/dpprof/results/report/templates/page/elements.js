// Makes elements. Text becomes text nodes only, so no data are ever read as markup.

function make(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.filter(known).map((child) => (child instanceof Node ? child : visible(child))));
  return element;
}

let made = 0;
const newId = (stem) => `${stem}-${(made += 1)}`;

// A labelled choice; `choices` are [value, text] or [group, [[value, text], ...]].
function choose(label, choices, chosen, onChange) {
  const id = newId("choice");
  const option = ([value, text]) => make("option", { value, selected: value === chosen }, text);
  const options = choices.map(([first, second]) =>
    Array.isArray(second) ? make("optgroup", { label: visible(first) }, ...second.map(option)) : option([first, second]),
  );
  const select = make("select", { id, onchange: () => onChange(select.value) }, ...options);
  return make("span", { class: "choice" }, make("label", { for: id }, label), select);
}

function save(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "text/csv;charset=utf-8" }));
  const link = make("a", { href: url, download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(url), 60_000); // a busy browser reads it later than one thinks
}

// A text that a spreadsheet would read as a formula gets an apostrophe in front, as in frames.py.
function csvCell(value) {
  if (!known(value)) return "";
  const text = typeof value === "string" && /^'*[=+\-@\t\r]/.test(value) ? `'${value}` : String(value);
  return /[",\n\r]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

function toCsv(names, rows) {
  return [names, ...rows.map((row) => names.map((name) => row[name]))]
    .map((cells) => cells.map(csvCell).join(","))
    .join("\n")
    .concat("\n");
}
