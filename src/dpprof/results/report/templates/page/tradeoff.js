// Time against memory, a point an experiment.

const HORIZONTAL = {
  median_step_s: ["step time (ms)", (one) => one.median_step_s * 1e3, (one) => one.peak_bytes],
  dp_flop_multiplier: ["FLOPs of a step over those that the model needs", (one) => one.dp_flop_multiplier, (one) => one.recorded_bytes],
};

function tellExperiment(one) {
  const interval = known(one.step_low_s) ? ` (${significant(one.step_low_s * 1e3)} to ${significant(one.step_high_s * 1e3)})` : "";
  const lines = [one.method, one.setting];
  if (known(one.median_step_s)) lines.push(`${milliseconds(one.median_step_s)} a step${interval}`);
  if (known(one.step_ratio)) lines.push(`${times(one.step_ratio)} the time of ${style.baseline}`);
  if (known(one.peak_bytes)) lines.push(`${bytes(one.peak_bytes)} ${one.peak_kind === "rss" ? "resident" : "allocated"} at the peak`);
  if (known(one.recorded_bytes)) lines.push(`${bytes(one.recorded_bytes)} ${one.recorded_how}`);
  if (known(one.dp_flop_multiplier)) lines.push(`${times(one.dp_flop_multiplier)} the FLOPs that the model needs`);
  lines.push("Click for its details.");
  return lines.map(visible).join("\n");
}


function showTradeoff() {
  const view = addView("tradeoff", "Time against memory", "A point is an experiment; lower left is better, larger points are larger batches. Point at one to read it, click it for its details.");
  const possibleOf = (name) => experiments.filter((one) => known(one[name]) && known(HORIZONTAL[name][2](one)));
  const possible = Object.keys(HORIZONTAL).filter((name) => possibleOf(name).length);
  if (!possible.length) return view.append(nothing("No experiment has both a time or FLOPs, and a peak."));
  const place = makePlace("Peak memory over time, one point for each experiment; the table below has the same");
  const below = make("div");
  let [across, setting] = [possible[0], fullest(possibleOf(possible[0]))];

  function show() {
    const [title, x, y] = HORIZONTAL[across];
    const wanted = possibleOf(across).filter((one) => !setting || one.setting === setting);
    const [unit, size] = unitOf(wanted.map(y));
    const values = wanted.map((one) => ({
      id: one.experiment_id, method: visible(one.method), batch: one.batch_size, x: x(one), y: y(one) / size, told: tellExperiment(one),
      low: known(one.step_low_s) ? one.step_low_s * 1e3 : null, high: known(one.step_high_s) ? one.step_high_s * 1e3 : null,
    }));
    const names = Object.keys(style.methods);
    const color = { field: "method", type: "nominal", title: null, scale: scaleOf(style.methods, names.filter((name) => values.some((one) => one.method === name))) };
    const vertical = { field: "y", type: "quantitative", title: `peak memory (${unit})`, scale: { zero: false, padding: 20 } };
    const interval = { mark: { type: "rule", strokeWidth: 1.5 }, transform: [{ filter: "isValid(datum.low)" }],
      encoding: { x: { field: "low", type: "quantitative" }, x2: { field: "high" }, y: vertical, color } };
    const points = { mark: { type: "point", filled: true, opacity: 0.9, stroke: colourOf("--text"), strokeWidth: 0.6, cursor: "pointer" },
      encoding: { x: { field: "x", type: "quantitative", title, scale: { zero: false, padding: 20 } }, y: vertical, color,
        size: { field: "batch", type: "quantitative", legend: null, scale: { range: [60, 220] } }, tooltip: { field: "told" } } };
    draw(place, (width) => ({ width: width - 90, height: 340, data: { values }, layer: across === "median_step_s" && values.some((one) => known(one.low)) ? [interval, points] : [points] }), (datum) => datum.id && openExperiment(datum.id));
    below.replaceChildren(rowsBelow("experiments with a time and a peak", [EXPERIMENT_COLUMNS[0], SETTING_COLUMN, ...EXPERIMENT_COLUMNS.slice(1)], wanted, "tradeoff"));
  }
  const settings = [...bySetting(experiments).keys()];
  const tools = make("p", { class: "tools" });
  const setAcross = (name) => {
    [across, setting] = [name, fullest(possibleOf(name))];
    choice.querySelector("select").value = String(settings.indexOf(setting));
    show();
  };
  if (possible.length > 1) tools.append(choose("Across", possible.map((name) => [name, HORIZONTAL[name][0]]), across, setAcross));
  const setSetting = (at) => {
    setting = at === "" ? "" : settings[at];
    show();
  };
  const choice = choose("Setting", [["", "all settings"], ...numbered(settings)], String(settings.indexOf(setting)), setSetting);
  if (settings.length > 1) tools.append(choice);
  view.append(tools, place, below);
  show();
}
