// The strip on top of a page that is served while a sweep runs, and what renews the page.

const EVERY_MS = 2000;
const QUIET_MS = 15000; // a reader who does nothing for so long is not disturbed by a new page
const PLACE = "dpprof-place";

const page = JSON.parse(document.getElementById("live-page").textContent);
const strip = document.getElementById("live");

// What a screen reader is told is apart from the times, which change with every answer.
const counts = make("p", { role: "status", class: "counts" });
const bar = make("progress", { "aria-label": "Runs that have ended", value: 0, max: 1 });
const now = make("div", { class: "now" });
const failed = make("details", { hidden: true });
const trouble = make("p", { role: "status", class: "trouble", hidden: true });
strip.append(counts, bar, now, failed, trouble);

const news = make("div", { id: "news", role: "status", hidden: true });
document.body.append(news);

function duration(seconds) {
  const whole = Math.round(seconds);
  if (whole < 60) return `${whole} s`;
  const minutes = Math.floor(whole / 60);
  return minutes < 60 ? `${minutes} min ${whole % 60} s` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

function setText(element, text) {
  if (element.textContent !== visible(text)) element.textContent = visible(text);
  element.hidden = !text;
}

function tellState({ goes_on, counts: { running, remaining } }) {
  if (running) return "";
  if (goes_on) return "Nothing is measured now: Snakemake plans, measures ceilings, verifies methods, or writes the report.";
  if (!remaining) return "Every planned run has ended.";
  return goes_on === null ? "It cannot be told whether a sweep runs." : "No sweep runs; snakemake continues it.";
}

function tellRunning({ run, elapsed_s, expected_s, expected_from }) {
  const expected = known(expected_s) ? `of about ${duration(expected_s)} (${expected_from})` : `expected time unknown: ${expected_from}`;
  return make("p", {}, `${run}: ${duration(elapsed_s)} ${expected}`);
}

function tellLeft({ left_s, left_unknown, counts: { running, remaining } }) {
  if (!running && !remaining) return "";
  const without = left_unknown ? `, without ${left_unknown} whose time is unknown` : "";
  return known(left_s) ? `About ${duration(left_s)} of measuring left${without}.` : "Time left: unknown until a run of the same instrument has ended.";
}

let shownFailures = "";
function showFailures(rows, total) {
  const told = JSON.stringify([rows, total]);
  if (told === shownFailures) return; // opened or not, it stays as it is
  shownFailures = told;
  failed.hidden = !total;
  const items = rows.map(({ run, outcome, reason }) => make("li", {}, `${run}: ${outcome}${known(reason) ? `: ${reason}` : ""}`));
  const more = total > rows.length ? [make("li", {}, `and ${fixed(total - rows.length)} more`)] : [];
  failed.replaceChildren(make("summary", {}, `${fixed(total)} did not succeed`), make("ul", {}, ...items, ...more));
}

function show(status) {
  const { done, running, failed: lost, remaining, planned } = status.counts;
  setText(counts, `${fixed(done)} of ${fixed(planned)} runs done, ${fixed(lost)} failed, ${fixed(running)} running, ${fixed(remaining)} remaining`);
  bar.max = Math.max(1, planned);
  bar.value = done + lost;
  const lines = [tellState(status), tellLeft(status)].filter(Boolean);
  now.replaceChildren(...status.running.map(tellRunning), ...lines.map((line) => make("p", {}, line)));
  showFailures(status.failed, lost);
}

// The place of a reader: the section on top, what is chosen, the words of filters, what is open.
const sectionsOf = () => [...document.querySelectorAll("main > section")];
const keyOf = (element) => {
  const label = element.tagName === "DETAILS" ? element.querySelector("summary") : element.labels?.[0];
  return `${element.closest("main > section")?.id} ${label?.textContent}`;
};
const fieldsOf = (tag) => [...document.querySelectorAll(`main ${tag}`)];

function keepPlace() {
  const above = sectionsOf().filter((section) => section.getBoundingClientRect().top <= 80).at(-1);
  const place = {
    section: above?.id ?? null,
    top: above ? above.getBoundingClientRect().top : window.scrollY,
    choices: fieldsOf("select").map((select) => [keyOf(select), select.selectedOptions[0]?.text]),
    filters: fieldsOf("input[type=search]").map((input) => [keyOf(input), input.value]),
    open: fieldsOf("details[open]").map(keyOf),
    failures: failed.open,
  };
  try {
    sessionStorage.setItem(PLACE, JSON.stringify(place));
  } catch {} // the page is then shown from its top
}

function findPlace() {
  let place = null;
  try {
    place = JSON.parse(sessionStorage.getItem(PLACE));
    sessionStorage.removeItem(PLACE);
  } catch {}
  if (!place) return;
  for (const [key, text] of place.choices) {
    const select = fieldsOf("select").find((one) => keyOf(one) === key);
    const at = [...(select?.options ?? [])].findIndex((option) => option.text === text);
    if (at < 0 || at === select.selectedIndex) continue;
    select.selectedIndex = at;
    select.dispatchEvent(new Event("change"));
  }
  for (const [key, text] of place.filters) {
    const input = text && fieldsOf("input[type=search]").find((one) => keyOf(one) === key);
    if (!input) continue;
    input.value = text;
    input.dispatchEvent(new Event("input"));
  }
  for (const one of fieldsOf("details")) if (place.open.includes(keyOf(one))) one.open = true;
  failed.open = place.failures;
  const section = place.section && document.getElementById(place.section);
  if (section) window.scrollBy(0, section.getBoundingClientRect().top - place.top);
  else window.scrollTo(0, place.top);
}

function renew() {
  keepPlace();
  window.location.reload();
}

let touched = performance.now();
for (const event of ["pointerdown", "pointermove", "keydown", "wheel", "scroll", "input"])
  window.addEventListener(event, () => (touched = performance.now()), { passive: true, capture: true });
const isReading = () => !document.hidden && (performance.now() - touched < QUIET_MS || !document.getSelection().isCollapsed);

let offered = null;
function offer(made) {
  if (!made || made.version === page.version) return;
  if (page.version === null || !isReading()) return renew();
  if (offered === made.version) return;
  offered = made.version;
  const more = made.results - page.results;
  const what = more > 0 ? `${fixed(more)} new result${more === 1 ? "" : "s"}` : "Results have changed";
  news.replaceChildren(make("span", {}, `${what}: `), make("button", { type: "button", onclick: renew }, "Show them"));
  news.hidden = false;
}

function tellTrouble(status) {
  const problems = [status.problem, known(status.page_problem) ? `The report below is not renewed: ${status.page_problem}` : null];
  if (!status.page && !problems.some(known)) return "The report of what has ended is being made.";
  return problems.filter(known).join(" ");
}

async function look() {
  try {
    const answer = await fetch("/status.json", { cache: "no-store", signal: AbortSignal.timeout(20000) });
    if (!answer.ok) throw new Error(answer.statusText);
    const status = await answer.json();
    if (status.counts) show(status);
    setText(trouble, tellTrouble(status));
    offer(status.page);
  } catch {
    setText(trouble, "dpprof watch does not answer; it may have been stopped. This page is as it was.");
  }
  setTimeout(look, EVERY_MS);
}

window.history.scrollRestoration = "manual";
const ready = () => document.documentElement.dataset.ready === "yes";
if (page.version !== null) {
  const observer = new MutationObserver(() => {
    if (!ready()) return;
    observer.disconnect();
    findPlace();
  });
  observer.observe(document.documentElement, { attributes: true, attributeFilter: ["data-ready"] });
}
look();
