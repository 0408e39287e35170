// Predicted and recorded peaks against the allocator's, which another process measured.

function showAccuracy() {
  const view = addView("accuracy", "Predicted against measured", "The peak that was recorded or predicted, over the allocator's own peak in another process. On the line both are equal.");
  const there = runs.filter((run) => known(run.allocator_peak_bytes));
  if (!there.length) return view.append(nothing("No recorded or predicted peak has a measured one to compare with."));
  const place = makePlace("Recorded and predicted peaks over measured ones; the table below has the same");
  const [unit, size] = unitOf(there.map((run) => run.allocator_peak_bytes));
  const values = there.map((run) => ({ measured: run.allocator_peak_bytes / size, told_peak: run.peak_bytes / size, method: visible(run.method), how: run.how,
    told: `${visible(run.method)}\n${visible(run.setting)}\n${run.how}: ${fixed(run.peak_bytes)} bytes\nmeasured: ${fixed(run.allocator_peak_bytes)} bytes\nleft over: ${fixed(run.gap_bytes)} bytes` }));
  const ends = [Math.min(...values.map((one) => Math.min(one.measured, one.told_peak))), Math.max(...values.map((one) => Math.max(one.measured, one.told_peak)))];
  const names = Object.keys(style.methods).filter((name) => values.some((one) => one.method === name));
  const scale = { type: "log", nice: false, domain: [ends[0] * 0.9, ends[1] * 1.1] };
  const axis = (field, title) => ({ field, type: "quantitative", title: `${title} (${unit})`, scale, axis: { format: ",~g", tickCount: 5 } });
  draw(place, (width) => ({ width: Math.min(width - 90, 460), height: 300, layer: [
    { data: { values: scale.domain.map((end) => ({ measured: end, told_peak: end })) }, mark: { type: "line", color: colourOf("--quiet"), strokeWidth: 1 }, encoding: { x: axis("measured", "measured peak"), y: axis("told_peak", "recorded or predicted") } },
    { data: { values }, mark: { type: "point", size: 70, strokeWidth: 2 }, encoding: { x: axis("measured", "measured peak"), y: axis("told_peak", "recorded or predicted"), tooltip: { field: "told" },
      shape: { field: "how", type: "nominal", title: null, scale: { domain: ["recorded", "predicted"], range: ["circle", "diamond"] } }, color: { field: "method", type: "nominal", title: null, scale: scaleOf(style.methods, names) } } },
  ] }));
  const rows = there.map((run) => ({ method: run.method, setting: run.setting, how: run.how, peak_bytes: run.peak_bytes, measured_bytes: run.allocator_peak_bytes, gap_bytes: run.gap_bytes, bound_bytes: run.bound_bytes, within_bound: run.valid }));
  view.append(place, rowsBelow("peaks", columnsOf(rows).map((column) => (column.name === "within_bound" ? { ...column, text: yes } : column)), rows, "accuracy"));
}
