// How runs ended, and the end of the log of each that failed.

const failures = unpack(content.failures);
const outcomes = unpack(content.outcomes);

const FAILURE_COLUMNS = [
  { name: "experiment_id", title: "experiment", scope: true, text: visible },
  { name: "instrument", title: "instrument", text: visible },
  { name: "outcome", title: "outcome" },
  { name: "error_kind", title: "kind", text: (value) => (known(value) ? visible(value) : UNKNOWN) },
  { name: "error_phase", title: "phase" },
  { name: "error_message", title: "message and log", cell: showMessage },
];

function showMessage(row) {
  const message = known(row.error_message) ? visible(row.error_message) : UNKNOWN;
  if (!known(row.log_end)) return make("span", {}, message, known(row.error_log) ? make("small", {}, ` (${visible(row.error_log)})`) : null);
  return make("details", { class: "log" }, make("summary", {}, message), make("p", {}, `The end of ${visible(row.error_log)}:`), make("pre", { tabindex: "0" }, row.log_end));
}

function showOutcomes() {
  const view = addView("outcomes", "Outcomes", "How runs ended, by method. Open a failure's message to read the end of its log.");
  if (!outcomes.length) return view.append(nothing("No run has a result."));
  const columns = ["method", "runs", ...Object.keys(style.outcomes), "success_rate"].map((name, at) => ({
    name, title: words(name), numeric: at > 0, scope: at === 0, text: name === "success_rate" ? percent : at ? (value) => fixed(value) : visible,
  }));
  view.append(makeTable("Runs by outcome", columns, outcomes), csvButton("outcomes", () => outcomes));
  if (!failures.length) return view.append(make("p", {}, "Every run succeeded."));
  view.append(make("h3", {}, "What did not succeed"), makeTable("Failed and missing runs", FAILURE_COLUMNS, failures), csvButton("failures", () => failures));
}
