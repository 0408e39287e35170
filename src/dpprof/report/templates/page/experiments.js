// Every experiment, as a table that sorts and filters.

const openButton = (one) => make("button", { type: "button", class: "open", onclick: () => openExperiment(one.experiment_id) }, one.method);

const EXPERIMENT_COLUMNS = [
  { name: "method", title: "method", scope: true, cell: openButton },
  { name: "setting", title: "setting", text: visible },
  { name: "median_step_s", title: "step (ms)", numeric: true, text: (value) => significant(known(value) ? value * 1e3 : null) },
  { name: "step_ratio", title: "over standard", numeric: true, text: (value) => fixed(value, 2) },
  { name: "peak_bytes", title: "peak", numeric: true, text: (value) => bytes(value) },
  { name: "peak_kind", title: "of", text: words },
  { name: "peak_ratio", title: "over standard", numeric: true, text: (value) => fixed(value, 2) },
  { name: "recorded_bytes", title: "peak by owners", numeric: true, text: (value) => bytes(value) },
  { name: "recorded_how", title: "is", text: words },
  { name: "dp_flop_multiplier", title: "FLOPs over model's", numeric: true, text: (value) => fixed(value, 2) },
  { name: "verified", title: "verified", text: yes },
  { name: "outcome", title: "outcome", text: words },
];

function showExperiments() {
  const view = addView("experiments", "Experiments", "Sort by a column's name; press a method's name for its details.");
  const used = EXPERIMENT_COLUMNS.filter(({ name }) => experiments.some((one) => known(one[name])));
  if (!experiments.length) return view.append(nothing("There is no experiment with a result."));
  view.append(makeTable("All experiments", used, experiments, { filter: true }), csvButton("experiments", () => experiments));
}
