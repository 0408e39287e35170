// Every experiment, as a table that sorts and filters; `same` says a column's value where all have it.

const openButton = (one) => make("button", { type: "button", class: "open", onclick: () => openExperiment(one.experiment_id) }, one.method);

const EXPERIMENT_COLUMNS = [
  { name: "method", title: "method", scope: true, cell: openButton },
  { name: "median_step_s", title: "step (ms)", numeric: true, text: (value) => significant(known(value) ? value * 1e3 : null) },
  { name: "step_ratio", title: "over standard", numeric: true, text: (value) => fixed(value, 2) },
  { name: "peak_bytes", title: "peak", numeric: true, text: (value) => bytes(value) },
  { name: "peak_kind", title: "of", same: "peak", text: words },
  { name: "peak_ratio", title: "over standard", numeric: true, text: (value) => fixed(value, 2) },
  { name: "recorded_bytes", title: "peak by owners", numeric: true, text: (value) => bytes(value) },
  { name: "recorded_how", title: "is", same: "peak by owners", text: words },
  { name: "dp_flop_multiplier", title: "FLOPs over model's", numeric: true, text: (value) => fixed(value, 2) },
  { name: "verified", title: "verified", same: "verified", text: yes },
  { name: "outcome", title: "outcome", same: "outcome", text: words },
];

const SETTING_COLUMN = { name: "setting", title: "setting", text: visible };

const TRAINING_COLUMNS = [
  { name: "method", title: "method", scope: true, text: visible },
  { name: "training", title: "training", text: visible },
  { name: "gpus", title: "GPUs", text: visible },
  { name: "safe_batch_size", title: "safe batch", numeric: true, text: (value) => fixed(value) },
  { name: "tokens_per_s", title: content.speed, numeric: true, text: significant },
  { name: "gpu_hours", title: "GPU hours", numeric: true, text: significant },
  { name: "price", title: "price", numeric: true, text: significant },
  { name: "verdict", title: "verdict", text: words },
  { name: "verified", title: "verified", text: yes },
];

const spellAxis = (name, value) => (name === "seq_len" ? `T = ${fixed(value)}` : name === "batch_size" ? `B = ${fixed(value)}` : typeof value === "string" && ["model", "dtype", "device", "target"].includes(name) ? value : `${words(name)} ${words(value)}`);

// The axes in which rows differ, as columns; and those that are the same in all, in words.
function splitAxes(rows) {
  const differs = content.axes.filter((name) => new Set(rows.map((row) => row[name])).size > 1);
  const same = content.axes.filter((name) => !differs.includes(name) && known(rows[0][name]) && !USUAL.has(name));
  const columns = differs.map((name) => ({ name, title: words(name), numeric: typeof rows[0][name] === "number", text: (value) => (typeof value === "number" ? fixed(value, Number.isInteger(value) ? 0 : 3) : words(value)) }));
  return [columns, same.map((name) => spellAxis(name, rows[0][name])).join(", ")];
}

// Axes that say nothing to most readers where they do not differ.
const USUAL = new Set(["seed", "learning_rate", "max_grad_norm", "noise_multiplier", "noise_strategy", "warmup_steps", "timed_steps", "memory_limit_bytes", "autocast", "keep_logits", "loop", "loss", "loss_dtype", "loss_scale", "attention", "checkpointed_share", "checkpointing", "execution", "head", "parameters_dtype", "trained_dtype", "cpu_threads", "optimizer", "device", "use_cache"]);

function showTable(view, title, rows) {
  if (!rows.length) return;
  const [axes, same] = splitAxes(rows);
  const told = EXPERIMENT_COLUMNS.filter(({ name }) => rows.some((one) => known(one[name])));
  const isSame = ({ name, same: of }) => of && rows.length > 1 && rows.every((one) => one[name] === rows[0][name]);
  const columns = [told[0], ...axes, ...told.slice(1).filter((column) => !isSame(column))];
  const all = [same, ...told.filter(isSame).map(({ name, same: of, text }) => `${of} ${text(rows[0][name])}`)].filter(Boolean).join(", ");
  view.append(make("h3", {}, title), all ? make("p", { class: "about" }, `All: ${all}.`) : "", makeTable(title, columns, rows, { filter: true }));
}

function showExperiments() {
  const view = addView("experiments", "Experiments", "Sort by a column's name; press a method's name for its details.");
  if (!experiments.length) return view.append(nothing("There is no experiment with a result."));
  const told = (one) => known(one.recorded_bytes) || known(one.peak_bytes) || known(one.median_step_s) || one.outcome !== "ok";
  showTable(view, "Measured on this machine", experiments.filter((one) => !known(one.target)));
  showTable(view, "Predicted for targets", experiments.filter((one) => known(one.target) && told(one)));
  if (trainings.length) {
    const used = TRAINING_COLUMNS.filter(({ name }) => trainings.some((one) => known(one[name])));
    view.append(make("h3", {}, "Predicted: what fits, and what it costs"), makeTable("What fits, and what it costs", used, trainings), csvButton("trainings", () => trainings, "Save what fits as CSV"));
  }
  view.append(csvButton("experiments", () => experiments, "Save all experiments as CSV"));
}
