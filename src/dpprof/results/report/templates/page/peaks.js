// What owns the memory at the peak, method by method.

// Stacked bars: `parts` are {bar, part, size, told}; bars in the order given.
function barsSpec(width, bars, parts, colours, names, title, rules = []) {
  const shown = names.filter((name) => parts.some((part) => part.part === name && part.size > 0));
  const longest = Math.max(...bars.map((bar) => parts.reduce((sum, part) => sum + (part.bar === bar ? part.size : 0), 0)));
  const told = shown.filter((name) => parts.some((part) => part.part === name && part.size > longest / 200));
  const y = { field: "bar", type: "nominal", title: null, sort: bars, axis: { labelLimit: 190, ticks: false, domain: false } };
  return {
    width: width - (width < 500 ? 130 : 210), height: { step: 26 },
    layer: [
      { data: { values: parts }, mark: { type: "bar", stroke: colourOf("--page"), strokeWidth: 0.6 },
        encoding: { y, x: { field: "size", type: "quantitative", title, stack: "zero" }, order: { field: "order" }, tooltip: { field: "told" },
          color: { field: "part", type: "nominal", title: null, scale: scaleOf(colours, shown), legend: { values: told } } } },
      ...(rules.length ? [{ data: { values: rules }, mark: { type: "tick", thickness: 2, size: 22, color: colourOf("--text") }, encoding: { y, x: { field: "size", type: "quantitative" }, tooltip: { field: "told" } } }] : []),
    ],
  };
}

function showPeaks() {
  const view = addView("peaks", "Memory at the peak", "What the memory is for, at the highest instant of a step. A tick is the allocator's own peak, measured by another process.");
  if (!runs.length) return view.append(nothing("No run of the instruments memory or estimate succeeded."));
  const [place, below] = [makePlace("Memory at the peak by component, a bar for each method; the table below has the same"), make("div")];
  const names = components.map(words);
  const colours = Object.fromEntries(components.map((name) => [words(name), style.components[name]]));

  function show(setting) {
    const of = runs.filter((run) => run.setting === setting);
    const mine = of.filter((run, at) => of.findIndex((other) => other.experiment_id === run.experiment_id) === at).sort((one, other) => one.peak_bytes - other.peak_bytes);
    const base = mine.find((run) => run.method === style.baseline)?.peak_bytes;
    const [unit, size] = unitOf(mine.map((run) => run.peak_bytes));
    const labels = mine.map((run, at) => (mine.findIndex((other) => other.method === run.method) === at ? visible(run.method) : `${visible(run.method)} (${at + 1})`));
    const parts = mine.flatMap((run, at) => heldAtPeak(run).map((name) => ({
      bar: labels[at], part: words(name), size: run[name] / size, order: components.indexOf(name),
      told: `${words(name)}: ${bytes(run[name])}\n${fixed((100 * run[name]) / run.peak_bytes, 1)} % of ${bytes(run.peak_bytes)}, ${run.how}\n${visible(run.method)}${base ? `, ${times(run.peak_bytes / base)} ${style.baseline}` : ""}`,
    })));
    const rules = mine.flatMap((run, at) => (known(run.allocator_peak_bytes) ? [{ bar: labels[at], size: run.allocator_peak_bytes / size, told: `allocator's peak: ${bytes(run.allocator_peak_bytes)}` }] : []));
    draw(place, (width) => barsSpec(width, labels, parts, colours, names, `live memory at the peak (${unit})`, rules));
    const rows = mine.map((run) => ({ method: run.method, instrument: run.instrument, peak_bytes: run.peak_bytes, allocator_peak_bytes: run.allocator_peak_bytes, ...Object.fromEntries(components.filter((name) => mine.some((other) => other[name] > 0)).map((name) => [`${name}_bytes`, run[name]])) }));
    below.replaceChildren(rowsBelow("memory at the peak", columnsOf(rows), rows, "peaks"));
  }
  showBySetting(view, runs, show, place, below);
}
