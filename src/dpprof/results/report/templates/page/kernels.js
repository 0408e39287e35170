// Where the time of a traced step goes, and how far its parts are from the device's ceilings.

const kernels = unpack(content.kernels);
const traces = unpack(content.traces).map(named);

function kernelRows(trace) {
  const ofIt = kernels.filter((row) => row.experiment_id === trace.experiment_id);
  const sums = [...groupBy(ofIt, (row) => row.op_kind)].map(([kind, rows]) => [kind, rows.reduce((sum, row) => sum + row.seconds, 0)]);
  return [...sums, ["idle", trace.idle_s]];
}

function showKernels() {
  const view = addView("kernels", "Kernels", "The time of a traced step by kind of operator, with the tracer's own cost. Idle is time in which no kernel ran.");
  if (!traces.length) return view.append(nothing("No run of the instrument kernels succeeded."));
  const [place, below] = [makePlace("Time of a step by op kind, a bar for each method; the table below has the same"), make("div")];
  const kinds = Object.keys(style.op_kinds);

  function show(setting) {
    const mine = traces.filter((trace) => trace.setting === setting).sort((one, other) => one.step_s - other.step_s);
    const rows = mine.flatMap((trace) => kernelRows(trace).map(([op_kind, seconds]) => ({ method: trace.method, op_kind, seconds, step_s: trace.step_s })));
    const parts = rows.map((row) => ({ bar: visible(row.method), part: row.op_kind, size: row.seconds * 1e3, order: kinds.indexOf(row.op_kind),
      told: `${words(row.op_kind)}: ${milliseconds(row.seconds)}\n${fixed((100 * row.seconds) / row.step_s, 1)} % of a step of ${milliseconds(row.step_s)}\n${visible(row.method)}` }));
    draw(place, (width) => barsSpec(width, mine.map((trace) => visible(trace.method)), parts, { ...style.op_kinds, idle: "#CCCCCC" }, kinds, "time of a traced step (ms)"));
    below.replaceChildren(rowsBelow("time by op kind", columnsOf(rows), rows, "kernels"));
  }
  showBySetting(view, traces, show, place, below);
}

function showRoofline() {
  const view = addView("roofline", "Roofline", "A point is one kind of operator in one phase, as large as its share of the step. The line is what this very device was measured to reach: copies on the slope, matrix products on top.");
  const known_ = kernels.filter((row) => row.flops > 0 && known(row.arithmetic_intensity) && known(row.flops_per_s) && known(row.ceiling_flops_per_s) && known(row.ceiling_bytes_per_s));
  const there = traces.filter((trace) => known_.some((row) => row.experiment_id === trace.experiment_id)).sort(byMethod);
  if (!there.length) return view.append(nothing("No run of the instrument kernels has both counted FLOPs and measured ceilings."));
  const [place, below] = [makePlace("FLOP/s over FLOPs per byte by op kind and phase; the table below has the same"), make("div")];

  function show(trace) {
    const mine = known_.filter((row) => row.experiment_id === trace.experiment_id);
    const all = mine.reduce((sum, row) => sum + row.seconds, 0);
    const rows = mine.map((row) => ({ op_kind: row.op_kind, phase: row.phase, seconds: row.seconds, flops: row.flops, arithmetic_intensity: row.arithmetic_intensity, flops_per_s: row.flops_per_s, bound: row.bound }));
    const { ceiling_flops_per_s: flat, ceiling_bytes_per_s: slope } = mine[0];
    const ridge = flat / slope;
    const along = [...mine.map((row) => row.arithmetic_intensity), ridge];
    const [left, right] = [Math.min(...along) / 3, Math.max(...along) * 4];
    const roof = [left, ridge, right].map((at) => ({ at, gflops: Math.min(slope * at, flat) / 1e9 }));
    const points = rows.map((row) => ({ at: row.arithmetic_intensity, gflops: row.flops_per_s / 1e9, kind: row.op_kind, phase: words(row.phase), share: row.seconds / all,
      told: `${words(row.op_kind)} in ${words(row.phase)}\n${milliseconds(row.seconds)}, ${fixed((100 * row.seconds) / all, 1)} % of the kernels' time\n${significant(row.flops_per_s / 1e9)} GFLOP/s at ${significant(row.arithmetic_intensity)} FLOPs a byte\n${fixed((100 * row.flops_per_s) / Math.min(flat, slope * row.arithmetic_intensity), 1)} % of the ceiling, bound by ${words(row.bound)}` }));
    const kinds = Object.keys(style.op_kinds).filter((kind) => points.some((point) => point.kind === kind));
    const upwards = [...points, ...roof].map((point) => point.gflops);
    const [bottom, top] = [Math.min(...upwards) / 2, Math.max(...upwards) * 2];
    const axis = (field, title, domain) => ({ field, type: "quantitative", title, scale: { type: "log", domain, nice: false }, axis: { values: decades(...domain), format: "~g" } });
    const [x, y] = [axis("at", "FLOPs per byte", [left, right]), axis("gflops", "GFLOP/s", [bottom, top])];
    draw(place, (width) => ({ width: width - 90, height: 320, layer: [
      { data: { values: roof }, mark: { type: "line", color: colourOf("--text"), strokeWidth: 1.5 }, encoding: { x, y } },
      { data: { values: points }, mark: { type: "point", filled: true, opacity: 0.9, stroke: colourOf("--text"), strokeWidth: 0.6 }, encoding: { x, y, tooltip: { field: "told" },
        size: { field: "share", type: "quantitative", legend: null, scale: { domain: [0, 1], range: [30, 1600] } },
        shape: { field: "phase", type: "nominal", title: null }, color: { field: "kind", type: "nominal", title: null, scale: scaleOf(style.op_kinds, kinds) } } },
    ] }));
    below.replaceChildren(rowsBelow("parts of the step", columnsOf(rows).map((column) => ({ ...column, text: column.numeric ? significant : column.text })), rows, "roofline"));
  }
  const names = there.map((trace) => `${trace.method}: ${trace.setting}`);
  const choice = choose("Experiment", numbered(names), "0", (at) => show(there[at]));
  view.append(make("p", { class: "tools" }, choice), place, below);
  show(there[0]);
}
