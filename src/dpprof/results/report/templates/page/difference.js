// Why one peak is higher than another: the same sums as `dpprof explain`, in the browser.

const LEVELS = [
  ["component", (held) => held.component],
  ["layer", (held) => held.layer],
  ["operator", (held) => (known(held.phase) ? `${held.op} (${held.phase})` : held.op)],
];
const ROUNDING = "allocator_rounding";

const sumOf = (rows) => rows.reduce((sum, row) => sum + row.bytes, 0);

// Bars {name, a, b, bars}: what each part holds in A and in B; the parts of a bar sum to it.
function subtract(a, b, levels = LEVELS) {
  if (!levels.length) return [];
  const [[, keyOf], ...deeper] = levels;
  const [ofA, ofB] = [a, b].map((rows) => groupBy(rows, keyOf));
  const bars = [...new Set([...ofA.keys(), ...ofB.keys()])].map((name) => {
    const [mine, others] = [ofA.get(name) ?? [], ofB.get(name) ?? []];
    return { name, a: sumOf(mine), b: sumOf(others), bars: subtract(mine, others, deeper) };
  });
  return sortBars(bars);
}

// The largest differences first.
function sortBars(bars) {
  const [gap, most] = [(bar) => Math.abs(bar.a - bar.b), (bar) => Math.max(bar.a, bar.b)];
  const byName = (one, other) => ((one.name ?? "") < (other.name ?? "") ? -1 : 1);
  return bars.sort((one, other) => gap(other) - gap(one) || most(other) - most(one) || byName(one, other));
}

// One bar for the same layer of every block, blocks.*.mlp.0; the bars still sum to the same.
function foldBlocks(bars) {
  const groups = groupBy(bars, (bar) => bar.name?.replace(/\.\d+(?=\.|$)/, ".*") ?? null);
  return sortBars([...groups].map(([name, group]) => (group.length > 1 ? merge(`${name} (${group.length} layers)`, group) : group[0])));
}

function merge(name, group) {
  const within = groupBy(group.flatMap((bar) => bar.bars), (part) => part.name);
  const sum = (side) => group.reduce((total, bar) => total + bar[side], 0);
  return { name, a: sum("a"), b: sum("b"), bars: sortBars([...within].map(([part, bars]) => merge(part, bars))) };
}

const held = content.holdings;

// Every byte of a run's peak as rows {component, layer, op, phase, bytes, storages}; null if unknown.
function holdingsOf(run) {
  const [first, end] = held.starts.slice(run.number, run.number + 2);
  if (!known(end) || first === end) return null;
  return Array.from({ length: end - first }, (_, at) =>
    Object.fromEntries(Object.entries(held.columns).map(([name, values]) => [name, values[first + at]])),
  );
}

// The same by component alone, which is known of every recorded or predicted run.
function componentsOf(run) {
  const rows = components.map((component) => ({ component, bytes: run[component] ?? 0 }));
  return [...rows, { component: ROUNDING, bytes: run.rounding_bytes ?? 0 }]
    .filter((row) => row.bytes)
    .map((row) => ({ layer: null, op: "", phase: "", storages: null, ...row }));
}

const peakOf = (run) => run.peak_bytes + (run.rounding_bytes ?? 0);

// The stretches of a step in one phase: {phase, rows, firstOp, ops, share of the step's operators}.
function partsOf({ ops, phase }) {
  const parts = [];
  for (const [row, name] of phase.entries()) {
    if (parts.at(-1)?.phase === name) parts.at(-1).rows.push(row);
    else parts.push({ phase: name, rows: [row] });
  }
  for (const part of parts) {
    part.firstOp = ops[part.rows[0]];
    part.ops = ops[Math.min(part.rows.at(-1) + 1, ops.length - 1)] - part.firstOp;
    part.share = part.ops ? part.ops / (ops.at(-1) - ops[0]) : 0;
  }
  return parts;
}

// Pairs the phases of two steps that both have in the same order: their longest common sequence.
function pairParts(a, b) {
  const common = Array.from({ length: a.length + 1 }, () => Array(b.length + 1).fill(0));
  for (let i = a.length - 1; i >= 0; i -= 1) {
    for (let j = b.length - 1; j >= 0; j -= 1) {
      common[i][j] = a[i].phase === b[j].phase ? common[i + 1][j + 1] + 1 : Math.max(common[i + 1][j], common[i][j + 1]);
    }
  }
  const pairs = [];
  for (let [i, j] = [0, 0]; i < a.length || j < b.length; ) {
    if (i < a.length && j < b.length && a[i].phase === b[j].phase) pairs.push([a[i++], b[j++]]);
    else if (i < a.length && (j === b.length || common[i + 1][j] >= common[i][j + 1])) pairs.push([a[i++], null]);
    else pairs.push([null, b[j++]]);
  }
  return pairs;
}

// Two timelines on an axis from 0 to 1, on which the phases that both have stand at the same place.
function shareAxis(a, b) {
  const parts = [partsOf(a), partsOf(b)];
  const pairs = pairParts(...parts.map((side) => side.filter((part) => part.ops)));
  const widths = pairs.map((pair) => pair.reduce((sum, part) => sum + (part?.share ?? 0), 0));
  const all = widths.reduce((sum, width) => sum + width, 0) || 1;
  let end = 0;
  const stretches = pairs.map((pair, at) => {
    const start = end;
    end += widths[at] / all;
    const stretch = { phase: (pair[0] ?? pair[1]).phase, start, end };
    for (const part of pair) if (part) part.stretch = stretch;
    return stretch;
  });
  const curve = (line, side) => {
    const totals = totalsOf(line);
    let end = 0; // of the phase before, where instants between phases stand
    return side.flatMap(({ rows, stretch, firstOp, ops }) => {
      const start = stretch?.start ?? end;
      end = stretch?.end ?? end;
      return rows.map((row) => ({
        position: stretch ? start + ((line.ops[row] - firstOp) / ops) * (end - start) : end,
        phase: line.phase[row], ops: line.ops[row], live_bytes: totals[row],
      }));
    });
  };
  return { stretches, curves: [curve(a, parts[0]), curve(b, parts[1])] };
}
