// Draws Vega-Lite charts in the page's colours, light or dark.

const dark = window.matchMedia("(prefers-color-scheme: dark)");
const colourOf = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

// On a dark page dark colours would be lost: black becomes white, the others lighter.
function shade(colour) {
  const parts = [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16));
  const brightness = (0.299 * parts[0] + 0.587 * parts[1] + 0.114 * parts[2]) / 255;
  if (!dark.matches || brightness > 0.35) return colour;
  const light = brightness ? parts.map((part) => Math.round(part + (255 - part) * 0.4)) : [255, 255, 255];
  return `rgb(${light.join(", ")})`;
}
const scaleOf = (colours, names) => ({ domain: names, range: names.map((name) => shade(colours[name] ?? "#888888")) });

function themeOf() {
  const [text, quiet, grid] = [colourOf("--text"), colourOf("--quiet"), colourOf("--line")];
  return {
    aria: false, // the table below each chart says the same in words
    background: null,
    font: "system-ui, sans-serif",
    view: { stroke: null },
    axis: { labelColor: quiet, titleColor: text, gridColor: grid, domainColor: quiet, tickColor: grid, titleFontWeight: "normal", titleFontSize: 12, labelFontSize: 11, labelLimit: 220, tickCount: 8 },
    legend: { labelColor: text, labelFontSize: 12, orient: "bottom", labelLimit: 260, columns: window.innerWidth < 700 ? 2 : 5, symbolBaseFillColor: quiet, symbolBaseStrokeColor: quiet },
    title: { color: text },
    text: { color: text },
    rule: { color: quiet },
  };
}

const hint = make("div", { id: "hint", role: "tooltip", hidden: true });
document.body.append(hint);

function showHint(_, event, __, value) {
  hint.hidden = !known(value) || value === "";
  if (hint.hidden) return;
  const lines = String(value).split("\n");
  hint.replaceChildren(...lines.map((line, at) => make(at ? "div" : "strong", {}, line)));
  const [width, height] = [hint.offsetWidth, hint.offsetHeight];
  const left = event.clientX + 14 + width > window.innerWidth ? event.clientX - width - 14 : event.clientX + 14;
  hint.style.left = `${Math.max(4, left)}px`;
  hint.style.top = `${Math.max(4, Math.min(event.clientY + 14, window.innerHeight - height - 8))}px`;
}
window.addEventListener("scroll", () => (hint.hidden = true), { passive: true });

const drawn = new Map(); // a chart's place: how to draw it again

// Charts are drawn when they are about to be seen, or printed.
const nearby = new IntersectionObserver(
  (entries) => entries.filter((entry) => entry.isIntersecting).forEach(({ target }) => drawNow(target)),
  { rootMargin: "400px" },
);
window.addEventListener("beforeprint", () => [...drawn.keys()].filter((place) => place.dataset.drawn !== "yes").forEach(drawNow));

// `specOf` is called again when the colours or the width change; `onClick` gets the datum.
function draw(place, specOf, onClick) {
  drawn.set(place, [specOf, onClick]);
  if (place.dataset.drawn) place.dataset.drawn = "again";
  nearby.unobserve(place);
  nearby.observe(place);
}

async function drawNow(place) {
  nearby.unobserve(place);
  if (!place.isConnected) return drawn.delete(place);
  const [specOf, onClick] = drawn.get(place);
  const spec = { $schema: "https://vega.github.io/schema/vega-lite/v6.json", ...specOf(Math.max(240, place.clientWidth)) };
  const many = (spec.data?.values?.length ?? 0) > 3000;
  const options = { actions: false, ast: true, config: themeOf(), defaultStyle: false, mode: "vega-lite", renderer: many ? "canvas" : "svg", tooltip: showHint };
  place.embedded?.finalize();
  place.embedded = await window.vegaEmbed(place, spec, options);
  if (onClick) place.embedded.view.addEventListener("click", (_, item) => item?.datum && onClick(item.datum));
  // Vega names the chart after itself; and the table below says in words what is in it.
  for (const [name, value] of [["role", "img"], ["aria-label", place.label], ["tabindex", "0"]]) place.setAttribute(name, value);
  place.querySelector("svg")?.setAttribute("aria-hidden", "true");
  place.dataset.drawn = "yes";
}

function drawAgain() {
  for (const [place, [specOf, onClick]] of drawn) draw(place, specOf, onClick);
}
dark.addEventListener("change", drawAgain);
let [waiting, lastWidth] = [null, window.innerWidth];
window.addEventListener("resize", () => {
  clearTimeout(waiting);
  waiting = setTimeout(() => {
    if (window.innerWidth !== lastWidth) drawAgain();
    lastWidth = window.innerWidth;
  }, 200);
});

const makePlace = (label) => Object.assign(make("figure", { class: "chart", "aria-label": label }), { label });

// The powers of ten in a range: what a logarithmic axis is labelled with.
function decades(low, high) {
  const [first, last] = [Math.ceil(Math.log10(low)), Math.floor(Math.log10(high))];
  return Array.from({ length: Math.max(0, last - first + 1) }, (_, at) => 10 ** (first + at));
}

// A stripe for each instant, seen where the pointer is; `values` have a place, `until` and `told`.
const hoverLayer = (values, x, height) => ({
  data: { values },
  mark: { type: "rect", color: colourOf("--text") },
  params: [{ name: "hover", select: { type: "point", on: "pointermove", clear: "pointerout" } }],
  encoding: {
    x, x2: { field: "until" }, y: { value: 0 }, y2: { value: height }, tooltip: { field: "told" },
    opacity: { condition: { param: "hover", empty: false, value: 0.25 }, value: 0 },
  },
});

// The phases of a step as a strip below the top of a chart; a name stands where it has room.
function phaseStrip(stretches, y, top, pixelsPerUnit) {
  const values = stretches.map(({ phase, start, end }, at) => ({
    start, end, middle: (start + end) / 2, low: top * 0.95, top, shade: at % 2,
    label: ((end - start) * pixelsPerUnit) / 6.2 >= phase.length ? words(phase) : "",
  }));
  const fill = { condition: { test: "datum.shade", value: colourOf("--line") }, value: colourOf("--panel") };
  return [
    { data: { values }, mark: { type: "rect" }, encoding: { x: { field: "start", type: "quantitative" }, x2: { field: "end" }, y: { ...y, field: "low" }, y2: { field: "top" }, fill } },
    { data: { values }, mark: { type: "text", fontSize: 10, baseline: "middle", dy: 8 }, encoding: { x: { field: "middle", type: "quantitative" }, y: { ...y, field: "top" }, text: { field: "label" } } },
  ];
}
