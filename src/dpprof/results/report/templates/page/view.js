// A view: a title, what it shows, its controls, a chart, its rows as a table, and as CSV.

function addView(id, title, about) {
  const heading = make("h2", { id: `${id}-title`, tabindex: "-1" }, title);
  const view = make("section", { id, "aria-labelledby": `${id}-title` }, heading, about ? make("p", { class: "about" }, about) : null);
  document.getElementById("main").append(view);
  document.getElementById("views").append(make("a", { href: `#${id}` }, title));
  return view;
}

function csvButton(name, rowsOf, label = "Save as CSV") {
  const onclick = () => {
    const rows = rowsOf();
    save(`${name}.csv`, toCsv(Object.keys(rows[0] ?? {}), rows));
  };
  return make("button", { type: "button", class: "csv", "data-csv": name, onclick }, label);
}

// The rows of a chart, for those who do not see it; made when it is opened.
function rowsBelow(caption, columns, rows, csv) {
  const details = make("details", {}, make("summary", {}, `Table: ${caption}`));
  details.addEventListener("toggle", () => {
    if (details.open && details.children.length === 1) details.append(makeTable(caption, columns, rows));
  });
  return make("div", { class: "below" }, csvButton(csv, () => rows), details);
}

const nothing = (why) => make("p", { class: "nothing" }, why);

// Shows the rows of one setting, first of the one that most are of; with a choice if there are more.
function showBySetting(view, rows, show, ...shown) {
  const [settings, first] = [[...bySetting(rows).keys()], fullest(rows)];
  const choice = settings.length > 1 ? choose("Setting", numbered(settings), String(settings.indexOf(first)), (at) => show(settings[at])) : null;
  view.append(make("p", { class: "tools" }, choice), ...shown);
  show(first);
}
