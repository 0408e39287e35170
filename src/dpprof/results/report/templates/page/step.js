// One experiment: what is known of it, its memory over a step, and what is held at the peak.

let openExperiment = () => {};

const FACTS = [
  ["outcome", "outcome", words],
  ["median_step_s", "step time", milliseconds],
  ["predicted_step_s", "predicted step time", milliseconds],
  ["step_ratio", "over standard", times],
  ["step_verdict", "compared with standard", words],
  ["tokens_per_s", "tokens (or images) a second", significant],
  ["peak_bytes", "measured peak", bytes],
  ["peak_ratio", "over standard", times],
  ["dp_flop_multiplier", "FLOPs over the model's", times],
  ["mfu", "MFU", percent],
  ["hfu", "HFU", percent],
  ["verified", "gradient verified", yes],
  ["mechanism", "mechanism", words],
  ["parameters_total", "parameters", fixed],
];

const HOLDING_COLUMNS = [
  { name: "component", title: "component", scope: true },
  { name: "bytes", title: "bytes", numeric: true, text: (value) => bytes(value) },
  { name: "storages", title: "storages", numeric: true, text: (value) => fixed(value) },
  { name: "layer", title: "layer", text: (value) => (known(value) ? visible(value) : "outside the model") },
  { name: "op", title: "allocated by operator", text: visible },
  { name: "phase", title: "in phase" },
];

function totalsOf(line) {
  return line.ops.map((_, at) => Object.values(line.components).reduce((sum, sizes) => sum + sizes[at], 0));
}

// Several instants may lie between two operators: these are spread up to the next one.
function placesOf(ops) {
  const places = [];
  for (const [op, rows] of groupBy([...ops.keys()], (row) => ops[row])) {
    for (const [nth, row] of rows.entries()) places[row] = op + nth / rows.length;
  }
  return places;
}

function tellInstant(run, line, totals, at) {
  const parts = Object.entries(line.components).map(([name, sizes]) => [name, sizes[at]]).filter(([, size]) => size > 0);
  parts.sort((one, other) => other[1] - one[1]);
  const peak = totals[at] === run.peak_bytes;
  const lines = [`${bytes(totals[at])} live`, `${words(line.phase[at])}, after operator ${fixed(line.ops[at])} of ${fixed(line.ops.at(-1))}${known(line.op[at]) ? `: ${visible(line.op[at])}` : ""}`];
  if (known(line.elapsed_s)) lines.push(`${significant(line.elapsed_s[at] * 1e3)} ms into the step`);
  if (peak) lines.push(`the peak: ${words(run.op)}${known(run.module) ? ` in ${visible(run.module)}` : ""}`);
  lines.push(...parts.slice(0, 8).map(([name, size]) => `${words(name)}: ${bytes(size)}`));
  if (parts.length > 8) lines.push(`and ${parts.length - 8} smaller`);
  return lines.join("\n");
}

function timelineSpec(run, line, width) {
  const totals = totalsOf(line);
  const [unit, size] = unitOf(totals);
  const names = components.filter((name) => line.components[name]);
  const places = placesOf(line.ops);
  const low = line.ops.map(() => 0);
  const areas = names.flatMap((name) => line.components[name].map((held, at) => {
    const from = low[at];
    low[at] += held / size;
    return { op: places[at], component: words(name), from, to: low[at] };
  }));
  const instants = line.ops.map((_, at) => ({ op: places[at], until: places[at + 1] ?? places[at] + 1, told: tellInstant(run, line, totals, at) }));
  const [top, end] = [(Math.max(...totals) / size) * 1.12, line.ops.at(-1) + 1];
  const stretches = partsOf(line).filter(({ ops }) => ops).map(({ phase, firstOp, ops }) => ({ phase, start: firstOp, end: firstOp + ops }));
  const colours = Object.fromEntries(names.map((name) => [words(name), style.components[name]]));
  const x = { field: "op", type: "quantitative", title: "operators run", scale: { domain: [0, end], nice: false }, axis: { grid: false } };
  const y = { type: "quantitative", title: `live memory (${unit})`, scale: { domain: [0, top], nice: false }, axis: { grid: false } };
  return {
    width: width - 90, height: 300,
    layer: [
      { data: { values: areas }, mark: { type: "area" }, encoding: { x, y: { ...y, field: "from" }, y2: { field: "to" },
        color: { field: "component", type: "nominal", title: null, scale: scaleOf(colours, names.map(words)) } } },
      ...phaseStrip(stretches, y, top, (width - 90) / end),
      hoverLayer(instants, x, 300),
    ],
  };
}

function instantRows(line) {
  const totals = totalsOf(line);
  return line.ops.map((op, at) => ({
    ops: op, op: line.op[at], phase: line.phase[at], ...(known(line.elapsed_s) ? { elapsed_s: line.elapsed_s[at] } : {}), live_bytes: totals[at],
    ...Object.fromEntries(Object.entries(line.components).map(([name, sizes]) => [`${name}_bytes`, sizes[at]])),
  }));
}

const columnsOf = (rows) => Object.keys(rows[0]).map((name, at) => ({
  name, title: words(name.replace(/_bytes$/, "")), numeric: typeof rows[0][name] === "number", scope: at === 0,
  text: name.endsWith("_bytes") ? (value) => bytes(value) : name.endsWith("_s") ? significant : (value) => (typeof value === "number" ? fixed(value) : typeof value === "boolean" ? yes(value) : words(value)),
}));

function showRun(run) {
  if (!run) return [nothing("Neither the instrument memory nor estimate told where this experiment's memory goes.")];
  const line = timelineOf(run);
  const target = known(run.target_memory_bytes) ? ` Its target has ${bytes(run.target_memory_bytes)}${known(run.fits) ? `: it ${run.fits ? "fits" : "does not fit"}.` : "."}` : "";
  const about = make("p", {}, `Peak ${run.how} by ${run.instrument}: ${bytes(run.peak_bytes)} in ${words(run.phase)}, made by ${words(run.op)}${known(run.module) ? ` in ${run.module}` : ""}.${target}`);
  if (!line) return [about, nothing("This page was thinned: results/tables/timeline.csv has this step.")];
  const place = makePlace(`Live memory by component over a step of ${nameOf(run.experiment_id)}; the table below has the same`);
  draw(place, (width) => timelineSpec(run, line, width));
  const rows = instantRows(line);
  const holdings = holdingsOf(run);
  const told = holdings ? [make("h3", {}, "Holdings at the peak"), makeTable("What is held at the peak, the largest first", HOLDING_COLUMNS, holdings), csvButton("holdings", () => holdings)] : [];
  return [about, place, rowsBelow("memory at each instant", columnsOf(rows), rows, "timeline"), ...told];
}

function showStep() {
  const view = addView("experiment", "One experiment", "Memory over one step in the steady state, by what it is for. Point at an instant to read the operator that ran last, the phase and what holds most.");
  if (!experiments.length) return view.append(nothing("There is no experiment with a result."));
  const usual = fullest(runs);
  const common = runs.filter((run) => run.setting === usual);
  const first = common.reduce((high, run) => (run.peak_bytes > (high?.peak_bytes ?? 0) ? run : high), null)?.experiment_id ?? experiments[0].experiment_id;
  const place = new Map(experiments.map((one, at) => [one.experiment_id, at]));
  const groups = [...bySetting(experiments)].map(([setting, ofIt]) => [setting, ofIt.sort(byMethod).map((one) => [String(place.get(one.experiment_id)), one.method])]);
  const panel = make("div");

  function show(one) {
    const facts = FACTS.filter(([name]) => known(one[name])).map(([name, title, text]) => make("div", {}, make("dt", {}, title), make("dd", {}, text(one[name]))));
    const mine = runsOf.get(one.experiment_id) ?? [];
    const body = make("div");
    const both = mine.length > 1 ? choose("Memory", mine.map((run) => [run.instrument, `${run.how} by ${run.instrument}`]), mine[0].instrument, (name) => body.replaceChildren(...showRun(mine.find((run) => run.instrument === name)))) : null;
    panel.replaceChildren(make("h3", {}, nameOf(one.experiment_id)), make("p", { class: "id" }, one.experiment_id), make("dl", {}, ...facts), make("p", { class: "tools" }, both), body);
    body.append(...showRun(mine[0]));
  }
  const choice = choose("Experiment", groups, String(place.get(first)), (at) => show(experiments[at]));
  view.append(make("p", { class: "tools" }, choice), panel);
  openExperiment = (id) => {
    choice.querySelector("select").value = String(place.get(id));
    show(experimentOf.get(id));
    view.scrollIntoView();
    view.querySelector("h2").focus({ preventScroll: true });
  };
  show(experimentOf.get(first));
}
