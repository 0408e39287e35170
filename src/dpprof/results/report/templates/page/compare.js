// Choose two experiments: a waterfall from B's peak to A's, and both steps on one axis.

const MOST_BARS = 14;
const [MORE, LESS] = ["#D55E00", "#0072B2"];
const signed = (value) => (value > 0 ? `+${bytes(value)}` : value < 0 ? `−${bytes(-value)}` : "0 B");
const barName = (name) => (name === null ? "outside the model" : visible(name).replaceAll("_", " "));

// The largest differences, and what the others come to together, so that nothing is left out.
function shortenBars(bars) {
  const differing = bars.filter((bar) => bar.a !== bar.b);
  if (differing.length <= MOST_BARS) return differing;
  const rest = differing.slice(MOST_BARS - 1);
  const sum = (side) => rest.reduce((total, bar) => total + bar[side], 0);
  return [...differing.slice(0, MOST_BARS - 1), { name: `${rest.length} smaller differences`, a: sum("a"), b: sum("b"), bars: [], joined: true }];
}

// What a bar consists of; of many layers, those of all blocks stand together.
const partsOfBar = (bar, depth) => (depth === 1 && bar.bars.length > MOST_BARS ? foldBlocks(bar.bars) : bar.bars);

function waterfallSpec(bars, ends, width) {
  let sum = 0;
  const [unit, size] = unitOf([...bars.map((bar) => bar.a - bar.b), ends.difference]);
  const rows = shortenBars(bars).map((bar) => {
    const start = sum;
    sum += bar.a - bar.b;
    const label = barName(bar.name);
    return { bar, label, start: start / size, end: sum / size, grows: bar.a > bar.b, text: signed(bar.a - bar.b), told: `${label}: ${signed(bar.a - bar.b)}\n${bytes(bar.a)} in A, ${bytes(bar.b)} in B${bar.bars.length ? "\nClick to look into it." : ""}` };
  });
  for (const alike of groupBy(rows, (row) => row.label).values()) {
    for (const [at, row] of alike.slice(1).entries()) row.label += ` (${at + 2})`;
  }
  const total = { label: ends.label, start: 0, end: sum / size, total: true, text: signed(sum), told: `A − B: ${signed(sum)}` };
  const values = [...rows, total].map((row) => ({ ...row, at: Math.max(row.start, row.end) }));
  const places = values.flatMap((row) => [row.start, row.end]);
  const [low, high] = [Math.min(0, ...places), Math.max(0, ...places)];
  const y = { field: "label", type: "nominal", title: null, sort: values.map((row) => row.label), axis: { labelLimit: width < 500 ? 120 : 230, ticks: false, domain: false, grid: false } };
  const x = { field: "start", type: "quantitative", title: `more than B (${unit})`, scale: { domain: [low, high + (high - low) * 0.12], nice: false } };
  return {
    width: width - (width < 500 ? 150 : 290), height: { step: 26 }, data: { values },
    layer: [
      { mark: { type: "bar", cursor: "pointer" }, encoding: { y, x, x2: { field: "end" }, tooltip: { field: "told" },
        color: { condition: [{ test: "datum.total", value: colourOf("--quiet") }, { test: "datum.grows", value: MORE }], value: LESS } } },
      { mark: { type: "text", align: "left", dx: 5, fontSize: 11 }, encoding: { y, x: { ...x, field: "at" }, text: { field: "text" } } },
    ],
  };
}

// What both steps hold from each place on the shared axis to the next.
function tellBoth(curves, names) {
  const places = [...new Set(curves.flatMap((curve) => curve.map((instant) => instant.position)))].sort((one, other) => one - other);
  const at = [0, 0];
  return places.map((place, number) => {
    const told = curves.map((curve, side) => {
      while (curve[at[side] + 1]?.position <= place) at[side] += 1;
      const instant = curve[at[side]];
      return `${names[side]}: ${bytes(instant.live_bytes)} in ${words(instant.phase)}, after operator ${fixed(instant.ops)}`;
    });
    return { at: place, until: places[number + 1] ?? 1, told: told.join("\n") };
  });
}

function bothSpec({ stretches, curves }, names, width) {
  const [unit, size] = unitOf(curves.flatMap((curve) => curve.map((instant) => instant.live_bytes)));
  const values = curves.flatMap((curve, side) => curve.map((instant) => ({ at: instant.position, live: instant.live_bytes / size, side: "AB"[side] })));
  const top = Math.max(...values.map((one) => one.live)) * 1.1;
  const x = { field: "at", type: "quantitative", title: "phases of a step, as long as their mean share of operators", scale: { domain: [0, 1] }, axis: { labels: false, ticks: false, grid: false } };
  const y = { field: "live", type: "quantitative", title: `live memory (${unit})`, scale: { domain: [0, top], nice: false } };
  return {
    width: width - 90, height: 260,
    layer: [
      ...phaseStrip(stretches, y, top, width - 90),
      { data: { values }, mark: { type: "line", strokeWidth: 1.8 }, encoding: { x, y, order: { field: "at" }, color: { field: "side", type: "nominal", title: null, scale: { domain: ["A", "B"], range: [MORE, dark.matches ? "#56B4E9" : LESS] } } } },
      hoverLayer(tellBoth(curves, names), x, 260),
    ],
  };
}

const DIFFERENCE_COLUMNS = [
  { name: "name", title: "part", scope: true, text: barName },
  { name: "a_bytes", title: "A", numeric: true, text: (value) => bytes(value) },
  { name: "b_bytes", title: "B", numeric: true, text: (value) => bytes(value) },
  { name: "difference_bytes", title: "A − B", numeric: true, text: signed },
];

// The waterfall as rows for a file: one for each component, layer and operator.
function leaves(bars, path = []) {
  return bars.flatMap((bar) => (bar.bars.length ? leaves(bar.bars, [...path, bar.name]) : [[...path, bar.name, bar]]));
}
const leafRows = (bars) => leaves(bars).map((leaf) => {
  const [bar, names] = [leaf.at(-1), leaf.slice(0, -1)];
  return { ...Object.fromEntries(LEVELS.slice(0, names.length).map(([level], at) => [level, names[at]])), a_bytes: bar.a, b_bytes: bar.b, difference_bytes: bar.a - bar.b };
});

function showCompare() {
  const view = addView("compare", "Why does A need more than B?", "Choose any two, recorded or predicted. Each bar is what A holds more, or less, than B at its peak; look into a bar by layer, then by operator.");
  if (runs.length < 2) return view.append(nothing("Two runs of the instruments memory or estimate are needed."));
  const label = (run) => `${run.method}, ${run.how}`;
  const groups = [...bySetting(runs)].map(([setting, ofIt]) => [setting, ofIt.sort(byMethod).map((run) => [String(run.number), label(run)])]);
  const usual = fullest(runs);
  const common = runs.filter((run) => run.setting === usual).sort((one, other) => peakOf(other) - peakOf(one));
  let [a, b] = [common[0], common.find((run) => run.method === style.baseline && run.number !== common[0].number) ?? common.at(-1)];
  if (a === b) b = runs.find((run) => run !== a);
  const panel = make("div");

  function show() {
    const full = [holdingsOf(a), holdingsOf(b)];
    const whole = full.every(known);
    const bars = whole ? subtract(...full) : subtract(componentsOf(a), componentsOf(b), LEVELS.slice(0, 1));
    const difference = peakOf(a) - peakOf(b);
    const left = difference - bars.reduce((sum, bar) => sum + bar.a - bar.b, 0);
    const most = bars.filter((bar) => (bar.a - bar.b) * difference > 0).slice(0, 2).map((bar) => `${signed(bar.a - bar.b)} of ${barName(bar.name)}`);
    const which = difference > 0 ? "more than" : "less than";
    const sentence = difference ? `${label(a)} needs ${bytes(Math.abs(difference))} ${which} ${label(b)}${most.length ? `: mostly ${most.join(" and ")}` : ""}.` : `Both need ${bytes(peakOf(a))}.`;
    const path = [];
    const inside = make("div");

    function showLevel() {
      const place = makePlace("Waterfall from B's peak to A's; the table below has the same");
      const chain = [];
      let here = bars;
      for (const at of path) {
        chain.push(here[at]);
        here = partsOfBar(here[at], chain.length);
      }
      const crumbs = [make("button", { type: "button", onclick: () => goTo(0) }, "All"), ...chain.map((bar, depth) => make("button", { type: "button", onclick: () => goTo(depth + 1) }, barName(bar.name)))];
      const inner = here.map((bar, at) => [String(at), `${barName(bar.name)}: ${signed(bar.a - bar.b)}`]).filter((_, at) => here[at].bars.length && here[at].bars.some((bar) => bar.a !== bar.b));
      const into = inner.length ? choose("Look into", [["", "choose a part"], ...inner], "", (at) => at !== "" && goInto(Number(at))) : null;
      const ends = { label: path.length ? "together" : "A − B", difference: chain.length ? chain.at(-1).a - chain.at(-1).b : difference };
      const rows = here.map((bar) => ({ name: bar.name, a_bytes: bar.a, b_bytes: bar.b, difference_bytes: bar.a - bar.b }));
      draw(place, (width) => waterfallSpec(here, ends, width), ({ bar }) => bar?.bars?.length && goInto(here.findIndex((one) => one.name === bar.name)));
      inside.replaceChildren(
        make("p", { class: "tools" }, make("span", {}, `By ${LEVELS[path.length][0]}`), ...(path.length ? crumbs : []), into), place,
        make("p", { class: "sum" }, chain.length ? `The bars sum to ${fixed(ends.difference)} bytes.` : `The peaks differ by ${fixed(difference)} bytes; the bars leave ${fixed(left)} bytes.`),
        rowsBelow(`what each holds, by ${LEVELS[path.length][0]}`, DIFFERENCE_COLUMNS, rows, "difference"),
      );
    }
    const goTo = (depth) => { path.length = depth; showLevel(); };
    const goInto = (at) => { path.push(at); showLevel(); };
    showLevel();

    const lines = [timelineOf(a), timelineOf(b)];
    const names = [a, b].map((run, side) => `${"AB"[side]}: ${visible(label(run))}`);
    const both = [];
    if (lines.every(known)) {
      const shared = shareAxis(...lines);
      const place = makePlace("Live memory of both steps on one axis; the file of the button below has the same");
      draw(place, (width) => bothSpec(shared, names, width));
      const rows = shared.curves.flatMap((curve, side) => curve.map((instant) => ({ run: "AB"[side], ...instant })));
      both.push(make("h3", {}, "Both steps"), place, rowsBelow("both steps", columnsOf(rows), rows, "both-steps"));
    } else both.push(nothing("This page was thinned, and lacks one of these timelines."));
    panel.replaceChildren(
      make("p", { class: "verdict", role: "status" }, sentence),
      ...(whole ? [] : [make("p", { class: "about" }, "Only components are known of one of the two: its file is not here, or this page was thinned.")]),
      inside, csvButton("waterfall", () => leafRows(bars), "Save all levels as CSV"), ...both,
    );
  }
  const choices = make("p", { class: "tools" });
  function fill() {
    choices.replaceChildren(
      choose("A", groups, String(a.number), (number) => { a = runs[number]; show(); }),
      choose("B", groups, String(b.number), (number) => { b = runs[number]; show(); }),
      make("button", { type: "button", onclick: () => { [a, b] = [b, a]; fill(); show(); } }, "Swap"),
    );
  }
  fill();
  view.append(choices, panel);
  show();
}
