// What the report embeds, as rows.

const packed = Uint8Array.from(atob(document.getElementById("content").textContent), (letter) => letter.charCodeAt(0));
const unzipped = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
const content = await new Response(unzipped).json();
const style = content.style;
// Charts know methods by their names as shown.
style.methods = Object.fromEntries(Object.entries(style.methods).map(([name, colour]) => [visible(name), colour]));

function unpack({ rows, columns }) {
  const named = Object.entries(columns);
  return Array.from({ length: rows }, (_, row) =>
    Object.fromEntries(named.map(([name, values]) => [name, values[row]])),
  );
}

const experiments = unpack(content.experiments);
const experimentOf = new Map(experiments.map((one) => [one.experiment_id, one]));
const nameOf = (id) => {
  const one = experimentOf.get(id);
  return one ? `${one.method}: ${one.setting}` : id;
};

// What is told of an experiment, with its method and its setting.
function named(row) {
  const { method = UNKNOWN, setting = "other experiments" } = experimentOf.get(row.experiment_id) ?? {};
  return { ...row, method, setting };
}

// Runs that recorded or predicted a step; a run's number is its place.
const runs = unpack(content.peaks).map((peak, number) => ({ ...named(peak), number, how: peak.instrument === "estimate" ? "predicted" : "recorded" }));
const runsOf = groupBy(runs, (run) => run.experiment_id);
for (const one of experiments) {
  const [run] = runsOf.get(one.experiment_id) ?? [];
  one.recorded_bytes = run?.peak_bytes ?? null;
  one.recorded_how = run?.how ?? null;
}
const components = Object.keys(style.components);
const heldAtPeak = (run) => components.filter((name) => run[name] > 0);

const timelineOf = (run) => content.timelines[run.number] ?? null;
const bySetting = (rows) => groupBy(rows, (row) => row.setting);

// A setting's place in a list is its value in a choice: names may hold anything.
const numbered = (names) => names.map((name, number) => [String(number), name]);
const byMethod = (one, other) =>
  (one.method !== style.baseline) - (other.method !== style.baseline) || (one.method < other.method ? -1 : 1);

// The setting that most rows are of: there methods compare best.
const fullest = (rows) => [...bySetting(rows)].sort(([, rows], [, others]) => others.length - rows.length)[0]?.[0];
