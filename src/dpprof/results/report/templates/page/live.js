// Loads the page again while a sweep runs, and keeps the reader's place.

const QUIET_MS = 15000; // a reader who does nothing for so long is not disturbed by a new page
const PLACE = "dpprof-place";

const sectionsOf = () => [...document.querySelectorAll("main > section")];
const fieldsOf = (tag) => [...document.querySelectorAll(`main ${tag}`)];
const keyOf = (element) => {
  const label = element.tagName === "DETAILS" ? element.querySelector("summary") : element.labels?.[0];
  return `${element.closest("main > section")?.id} ${label?.textContent}`;
};

// The section on top, what is chosen, the words of filters, and what is open.
function keepPlace() {
  const above = sectionsOf().filter((section) => section.getBoundingClientRect().top <= 80).at(-1);
  const place = {
    section: above?.id ?? null,
    top: above ? above.getBoundingClientRect().top : window.scrollY,
    choices: fieldsOf("select").map((select) => [keyOf(select), select.selectedOptions[0]?.text]),
    filters: fieldsOf("input[type=search]").map((input) => [keyOf(input), input.value]),
    open: fieldsOf("details[open]").map(keyOf),
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
  const section = place.section && document.getElementById(place.section);
  if (section) window.scrollBy(0, section.getBoundingClientRect().top - place.top);
  else window.scrollTo(0, place.top);
}

let timer = null;
function wait() {
  clearTimeout(timer);
  timer = setTimeout(() => {
    if (document.hidden || !document.getSelection().isCollapsed) return wait();
    keepPlace();
    window.location.reload();
  }, QUIET_MS);
}
for (const event of ["pointerdown", "pointermove", "keydown", "wheel", "scroll", "input"])
  window.addEventListener(event, wait, { passive: true, capture: true });

window.history.scrollRestoration = "manual";
new MutationObserver((_, observer) => {
  if (document.documentElement.dataset.ready !== "yes") return;
  observer.disconnect();
  findPlace();
  wait();
}).observe(document.documentElement, { attributes: true, attributeFilter: ["data-ready"] });
