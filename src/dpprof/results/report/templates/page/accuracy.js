// What was predicted or recorded beside what another process measured: peaks, and step times.

const SHAPES = { recorded: "circle", predicted: "diamond" };

// A chart of told over measured with logarithmic axes of one range; on the line both are equal.
// Each value has measured, said, low, high, method, how and told.
function comparedSpec(values, unit, [measured, said], width) {
  const hows = Object.keys(SHAPES).filter((how) => values.some((one) => one.how === how));
  const ends = values.flatMap((one) => [one.measured, one.low, one.high]);
  const names = Object.keys(style.methods).filter((name) => values.some((one) => one.method === name));
  const scale = { type: "log", nice: false, domain: [Math.min(...ends) * 0.9, Math.max(...ends) * 1.1] };
  const axis = (field, title) => ({ field, type: "quantitative", title: `${title} (${unit})`, scale, axis: { format: ",~g", tickCount: 5 } });
  const x = axis("measured", measured);
  const color = { field: "method", type: "nominal", title: null, scale: scaleOf(style.methods, names) };
  return { width: Math.min(width - 90, 460), height: 300, layer: [
    { data: { values: scale.domain.map((end) => ({ measured: end, said: end })) }, mark: { type: "line", color: colourOf("--quiet"), strokeWidth: 1 }, encoding: { x, y: axis("said", said) } },
    { data: { values: values.filter((one) => one.high > one.low) }, mark: { type: "rule", strokeWidth: 1.5 }, encoding: { x, y: axis("low", said), y2: { field: "high" }, color } },
    { data: { values }, mark: { type: "point", size: 70, strokeWidth: 2 }, encoding: { x, y: axis("said", said), tooltip: { field: "told" }, color,
      shape: { field: "how", type: "nominal", title: null, scale: { domain: hows, range: hows.map((how) => SHAPES[how]) } } } },
  ] };
}

function showPeaksCompared() {
  const there = runs.filter((run) => known(run.allocator_peak_bytes));
  if (!there.length) return [nothing("No recorded or predicted peak has a measured one to compare with.")];
  const place = makePlace("Recorded and predicted peaks over measured ones; the table below has the same");
  const [unit, size] = unitOf(there.map((run) => run.allocator_peak_bytes));
  const values = there.map((run) => {
    const said = run.peak_bytes / size;
    return { measured: run.allocator_peak_bytes / size, said, low: said, high: said, method: visible(run.method), how: run.how,
      told: `${visible(run.method)}\n${visible(run.setting)}\n${run.how}: ${fixed(run.peak_bytes)} bytes\nmeasured: ${fixed(run.allocator_peak_bytes)} bytes\nleft over: ${fixed(run.gap_bytes)} bytes` };
  });
  draw(place, (width) => comparedSpec(values, unit, ["measured peak", "recorded or predicted"], width));
  const rows = there.map((run) => ({ method: run.method, setting: run.setting, how: run.how, peak_bytes: run.peak_bytes, measured_bytes: run.allocator_peak_bytes, gap_bytes: run.gap_bytes, bound_bytes: run.bound_bytes, within_bound: run.valid }));
  return [place, rowsBelow("peaks", columnsOf(rows), rows, "accuracy")];
}

function showTimesCompared() {
  const there = experiments.filter((one) => known(one.predicted_step_s) && known(one.median_step_s));
  if (!there.length) return [nothing("No experiment has both a predicted and a measured step time.")];
  const place = makePlace("Predicted step times over measured ones, with 90 % intervals; the table below has the same");
  const values = there.map((one) => ({ measured: one.median_step_s * 1e3, said: one.predicted_step_s * 1e3, low: one.predicted_step_low_s * 1e3, high: one.predicted_step_high_s * 1e3, method: visible(one.method), how: "predicted",
    told: `${visible(one.method)}\n${visible(one.setting)}\npredicted: ${milliseconds(one.predicted_step_s)} (${milliseconds(one.predicted_step_low_s)} to ${milliseconds(one.predicted_step_high_s)})\nmeasured: ${milliseconds(one.median_step_s)}` }));
  draw(place, (width) => comparedSpec(values, "ms", ["measured step", "predicted step"], width));
  const rows = there.map((one) => ({ method: one.method, setting: one.setting, predicted_step_s: one.predicted_step_s, low_s: one.predicted_step_low_s, high_s: one.predicted_step_high_s, measured_step_s: one.median_step_s,
    inside: one.predicted_step_low_s <= one.median_step_s && one.median_step_s <= one.predicted_step_high_s }));
  return [place, rowsBelow("step times", columnsOf(rows), rows, "predicted-times")];
}

function showAccuracy() {
  const view = addView("accuracy", "Predicted against measured", "What was predicted or recorded, over what another process measured. On the line both are equal.");
  view.append(make("h3", {}, "Peaks"), ...showPeaksCompared(), make("h3", {}, "Step times"), ...showTimesCompared());
}
