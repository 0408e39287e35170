// What a training takes, as the reader types: from the predicted seconds of a sample and of an update.

const trainings = unpack(content.trainings);
const NUMBERS = [["batch", "Samples in a step"], ["tokens", "Tokens"], ["price", "Price of a GPU for an hour"]];

// Steps, hours and price on one GPU, as dpprof budget says them; or why there are none.
function priceOf(one, { batch, tokens, price }) {
  const micro = Math.ceil(batch / Math.ceil(batch / one.safe_batch_size));
  if (micro < one.smallest_batch_size) return { why: `${one.method} takes ${fixed(one.smallest_batch_size)} samples or more at a time.` };
  const steps = Math.ceil(tokens / (batch * one.tokens_per_sample));
  const hours = (steps * (batch * one.sample_s + one.update_s)) / 3600;
  const [low, high] = [one.tokens_per_s_high, one.tokens_per_s_low].map((speed) => (hours * one.tokens_per_s) / speed);
  return { steps, micro, hours, low, high, price: hours * price };
}

// A sample's time over that of the first method there, which a budget does not change.
function tellRatio(one) {
  const first = trainings.find((other) => other.training === one.training && other.gpus === one.gpus && other.verdict === "first");
  if (!first || one === first || !known(one.over_first_low)) return "";
  const [ratio, low, high] = [one.over_first, one.over_first_low, one.over_first_high].map((number) => significant(number));
  return ` A sample takes ${ratio} times as long as with ${first.method} (90 % interval ${low} to ${high}${one.verdict === "close" ? ": no difference is predicted" : ""}).`;
}

function tellPrice(one, typed) {
  const [, title] = NUMBERS.find(([name]) => !(typed[name] > 0 || (name === "price" && typed[name] === 0))) ?? [];
  if (title) return `${title}: type a number above 0.`;
  const told = priceOf(one, typed);
  if (told.why) return told.why;
  return `${fixed(told.steps)} steps take ${significant(told.hours)} GPU hours (90 % interval ${significant(told.low)} to ${significant(told.high)}) and cost ${significant(told.price)}, with ${fixed(told.micro)} samples at a time on ${one.gpus === "this machine" ? "" : "one "}${one.gpus}.${tellRatio(one)}${one.verified || !one.private ? "" : " The method is not verified here to compute the right gradient."}`;
}

function showCalculator() {
  const able = trainings.filter((one) => known(one.sample_s) && known(one.safe_batch_size) && one.ranks === 1 && one.verdict !== "wrong");
  if (!able.length) return;
  const view = addView("calculator", "What would it cost?", "Predicted, on one GPU, for the expected samples of Poisson-sampled batches. Type, and read the answer; dpprof budget tells the noise of another batch too.");
  const [noise] = unpack(content.noise);
  const first = able.find((one) => known(one.price) && one.gpu_hours > 0);
  const typed = { batch: noise?.batch_size ?? able[0].safe_batch_size, tokens: noise?.tokens ?? 1e9, price: first ? Number((first.price / first.gpu_hours).toPrecision(6)) : 1 };
  const answer = make("p", { class: "told", role: "status" });
  const places = [["training", "Training"], ["gpus", "GPU"], ["method", "Method"]];
  let chosen = able.find((one) => one.private) ?? able[0];

  const say = () => (answer.textContent = visible(tellPrice(chosen, typed)));
  const tools = make("div", { class: "tools" });
  // A choice keeps those before it, and of those after it what is still possible.
  function pick(at, value) {
    const before = (one) => places.slice(0, at).every(([name]) => one[name] === chosen[name]);
    const score = (one) => places.slice(at + 1).filter(([name]) => one[name] === chosen[name]).length;
    chosen = able.filter((one) => before(one) && one[places[at][0]] === value).sort((one, other) => score(other) - score(one))[0];
    offer(at);
  }
  const choices = make("div", { class: "tools" });
  function offer(focused) {
    choices.replaceChildren(...places.map(([name, title], at) => {
      const possible = able.filter((one) => places.slice(0, at).every(([before]) => one[before] === chosen[before]));
      const values = [...new Set(possible.map((one) => one[name]))];
      return choose(title, numbered(values), String(values.indexOf(chosen[name])), (value) => pick(at, values[value]));
    }));
    choices.querySelectorAll("select")[focused]?.focus();
    say();
  }
  for (const [name, title] of NUMBERS) {
    const id = newId("number");
    const input = make("input", { id, type: "number", min: "0", step: "any", inputmode: "decimal", value: typed[name] });
    input.addEventListener("input", () => {
      typed[name] = input.value === "" ? NaN : Number(input.value);
      say();
    });
    tools.append(make("span", { class: "choice" }, make("label", { for: id }, title), input));
  }
  view.append(choices, tools, answer);
  offer();
}
