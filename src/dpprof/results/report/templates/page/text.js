// Numbers and names as text.

const UNKNOWN = "–";

// Marks that reorder or hide text are shown by their code, so that no name looks like another.
const HIDDEN =
  /[\u0000-\u0009\u000b-\u001f\u007f-\u009f\u00ad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb]/g;

function visible(value) {
  return String(value).replace(
    HIDDEN,
    (mark) => `⟨U+${mark.charCodeAt(0).toString(16).toUpperCase().padStart(4, "0")}⟩`,
  );
}

const known = (value) => value !== null && value !== undefined;

function groupBy(items, keyOf) {
  const groups = new Map();
  for (const item of items) {
    const key = keyOf(item);
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(item);
  }
  return groups;
}

function fixed(value, digits = 0) {
  if (!known(value)) return UNKNOWN;
  const options = { minimumFractionDigits: digits, maximumFractionDigits: digits };
  return Number(value).toLocaleString("en", options);
}

function significant(value) {
  if (!known(value)) return UNKNOWN;
  if (!value) return "0";
  const digits = Math.min(8, Math.max(0, 2 - Math.floor(Math.log10(Math.abs(value)))));
  return fixed(value, digits);
}

const UNITS = [["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];

function bytes(value) {
  if (!known(value)) return UNKNOWN;
  const [unit, size] = UNITS.find(([, least]) => Math.abs(value) >= least) ?? ["B", 1];
  return `${size === 1 ? fixed(value) : significant(value / size)} ${unit}`;
}

// The unit that suits the largest of some sizes, for an axis.
function unitOf(sizes) {
  const most = sizes.reduce((high, size) => Math.max(high, Math.abs(size ?? 0)), 0);
  return UNITS.find(([, least]) => most >= 4 * least) ?? ["KiB", 2 ** 10];
}

const milliseconds = (value) => (known(value) ? `${significant(value * 1e3)} ms` : UNKNOWN);
const times = (value) => (known(value) ? `${fixed(value, 2)} ×` : UNKNOWN);
const percent = (value) => (known(value) ? `${significant(value * 100)} %` : UNKNOWN);
const words = (value) => (known(value) ? visible(value).replaceAll("_", " ") : UNKNOWN);
const yes = (value) => (known(value) ? (value ? "yes" : "no") : UNKNOWN);
