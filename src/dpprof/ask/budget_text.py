"""What `dpprof budget` says: on a screen, and in its details."""

from collections.abc import Iterable, Sequence

from dpprof.ask.layout import (
    explain_signs,
    explain_trust,
    fit_screen,
    format_number,
    group_messages,
    lay_out,
    name_adapters,
    name_settings,
)
from dpprof.experiments.accounting.plan import AtEpsilon, NoisePlan
from dpprof.experiments.config.privacy import Privacy
from dpprof.experiments.config.tasks import name_size
from dpprof.experiments.records.budget import Budget, MethodCost
from dpprof.results.analysis.standings import Marks, find_signs, sign
from dpprof.system.words import listed, plural, three_digits

_OF_NOISE = (
    "Noise: of a step, the noise multiplier over the batch; of the training, that over the root of "
    "the steps; in units of C. docs/numbers/budget.md"
)
_OF_EPSILON = (
    "Another epsilon: its batches in as many steps have the noise of the first epsilon in each; "
    "with the same batch, hours stay and the noise multiplier is another."
)
_OF_HOURS = (
    "GPU hours: of all GPUs together, for the expected samples of Poisson-sampled batches; kWh: of "
    "boards that draw the most they may."
)


def _find_rule(privacy: Privacy, noise: NoisePlan) -> str:
    """Return the rule by which the batch was chosen: given, noise, data or steps."""
    if privacy.batch_size is not None:
        return "given"
    larger = [batch for batch in noise.batches if batch.batch_size == 2 * noise.batch_size]
    if larger and larger[0].steps >= privacy.least_steps:
        return "noise"
    return "data" if 2 * noise.batch_size > privacy.samples else "steps"


def explain_choice(privacy: Privacy, noise: NoisePlan) -> str:
    """Say which batch is used, and by which rule."""
    why = {
        "given": "it was given.",
        "noise": "a larger one takes at most 5 % off the noise of the training.",
        "data": "it is the largest power of two that the data allow.",
        "steps": f"it is the largest power of two that leaves at least {privacy.least_steps:,} "
        "steps (--least-steps). Noise falls while batches grow; how few steps suffice is yours to "
        "know.",
    }[_find_rule(privacy, noise)]
    steps = noise.planned.steps
    return f"A batch of {noise.batch_size:,} samples is used, in {steps:,} steps: {why}"


def _tell_assumed(privacy: Privacy, noise: NoisePlan) -> list[str]:
    """Say in a line what was not given."""
    why = {
        "given": None,
        "noise": "batches: larger ones take 5 % off the noise at most",
        "data": "batches: the largest power of two in the data",
        "steps": f"batches: largest power of two in {privacy.least_steps:,} steps or more",
    }[_find_rule(privacy, noise)]
    stated = privacy.model_fields_set
    delta = None if "delta" in stated else "delta 0.1 / samples"
    is_tightest = privacy.accountant == "tightest"
    accountant = f"accountant {noise.planned.accountant}, the tightest here" * is_tightest
    assumed = [text for text in (delta, why, accountant) if text]
    return [f"Assumed: {'; '.join(assumed)}."] if assumed else []


def _find_best(costs: Iterable[MethodCost]) -> MethodCost | None:
    """Return the private method that takes the fewest GPU hours; None where none is known."""
    able = [cost for cost in costs if cost.private and cost.verified is not False]
    timed = [cost for cost in able if cost.gpu_hours is not None]
    return min(timed, key=lambda cost: cost.gpu_hours or 0.0, default=None)


def _list_first(budget: Budget) -> list[MethodCost]:
    """Return what methods cost at the epsilon to plan for."""
    return [c for c in budget.methods if c.epsilon in (None, budget.privacy.epsilon[0])]


def _name_price(cost: MethodCost) -> str:
    """Return the price of the hours after a comma; nothing where an hour has no price."""
    return "" if cost.price is None else f", price {cost.price:,.2f}"


def tell_price(budget: Budget) -> str:
    """Say what the best method takes for the budget, with which settings."""
    best = _find_best(_list_first(budget))
    settings = name_settings(budget.dtype, budget.optimizer, budget.execution)
    if best is None:
        return f"No hours are known of a private method ({settings})."
    gpus = "" if best.gpus == 1 else f" on {best.gpus:,} GPUs"
    low, hours, high = map(three_digits, (best.gpu_hours_low, best.gpu_hours, best.gpu_hours_high))
    return (
        f"Use {best.method}{gpus}: {hours} GPU hours ({low} to {high} at 90 %)"
        f"{_name_price(best)}, {settings}."
    )


def _tell_training(budget: Budget) -> str:
    """Say which training that is: model, budget, steps, batches and noise."""
    noise, privacy, best = budget.noise, budget.privacy, _find_best(_list_first(budget))
    trained = name_adapters(budget.model, budget.lora)
    size = name_size(budget.seq_len, budget.image_size)
    micro = f" ({best.micro_batch_size:,} at a time)" if best else ""
    return (
        f"{budget.model}{trained}, {size}, on {budget.target}, ({privacy.epsilon[0]:g}, "
        f"{privacy.delta:g})-DP: {noise.planned.steps:,} steps of "
        f"{noise.batch_size:,} samples{micro}, noise "
        f"{format_number(noise.planned.noise_multiplier, '.3f')}."
    )


def _tell_epsilon(budget: Budget, plan: AtEpsilon) -> str:
    """Say what another epsilon costs, or changes."""
    if plan.batch_size is None:
        return f"epsilon {plan.epsilon:g}: {plan.reason}"
    best = _find_best(cost for cost in budget.methods if cost.epsilon == plan.epsilon)
    hours = "" if best is None else f"{three_digits(best.gpu_hours)} GPU hours{_name_price(best)}, "
    same = format_number(plan.same_batch_noise_multiplier, ".3f")
    return (
        f"epsilon {plan.epsilon:g}: {hours}with batches of {plan.batch_size:,}; or the same batch "
        f"with noise {same}"
    )


def format_budget(budget: Budget) -> str:
    """Return what a budget costs as text that fits a screen."""
    costs = _list_first(budget)
    signs = find_signs(costs)
    return fit_screen(
        [tell_price(budget), _tell_training(budget), *_tell_assumed(budget.privacy, budget.noise)],
        _lay_out_costs(budget, costs, signs, {"epsilon", "batch", "noise", "kWh"}),
        [
            *(_tell_epsilon(budget, plan) for plan in budget.noise.epsilons[1:]),
            *_tell_cheapest(budget),
            *explain_signs(signs),
            explain_trust(budget.rests_on),
        ],
    )


def detail_budget(budget: Budget) -> str:
    """Return the noise of each batch, all costs, messages, and what the numbers rest on."""
    privacy, noise = budget.privacy, budget.noise
    others = noise.epsilons[1:]
    epochs = noise.planned.steps * noise.planned.sample_rate
    data = f"{privacy.tokens:,} tokens are {epochs:,.3g} epochs of {privacy.samples:,} samples."
    lines = [explain_choice(privacy, noise), data, *_lay_out_noise(noise)]
    lines += _lay_out_costs(budget, budget.methods, find_signs(budget.methods), set())
    shown = {plan.reason for plan in others}
    lines += group_messages((m.method, m.message) for m in budget.methods if m.message not in shown)
    lines += [_OF_EPSILON] * bool(others) + [
        _OF_NOISE,
        _OF_HOURS,
        f"Memory: {budget.sure_of_memory}.",
    ]
    return "\n".join([*lines, f"Time: {budget.sure_of_time}."])


def _lay_out_noise(noise: NoisePlan) -> list[str]:
    header = ("batch", "sample rate", "steps", "noise multiplier", "of a step", "of the training")
    rows = [
        (
            f"{batch.batch_size:,}" + (" *" if batch.batch_size == noise.batch_size else "  "),
            f"{batch.sample_rate:.3g}",
            f"{batch.steps:,}",
            format_number(batch.noise_multiplier, ".3f"),
            format_number(batch.step_noise, ".3g"),
            format_number(batch.training_noise, ".3g"),
        )
        for batch in noise.batches
    ]
    reasons = [batch.reason for batch in noise.batches if batch.reason]
    return [*lay_out([header, *rows], texts=()), *dict.fromkeys(reasons)]


def _lay_out_costs(
    budget: Budget, costs: Sequence[MethodCost], signs: Marks, hidden: set[str]
) -> list[str]:
    rows = [_list_cells(cost, signs) for cost in costs]
    hidden |= set() if budget.privacy.price_per_hour is not None else {"price"}
    if all(cost.gpus == 1 for cost in costs):
        hidden |= {"GPUs", "hours"}
    header = [name for name in rows[0] if name not in hidden]
    return lay_out([header, *([row[name] for name in header] for row in rows)])


def _list_cells(cost: MethodCost, signs: Marks) -> dict[str, str]:
    """Return the cells of a method, by the heads of their columns."""
    is_known = cost.gpu_hours is not None
    low, high, hours = map(three_digits, (cost.gpu_hours_low, cost.gpu_hours_high, cost.gpu_hours))
    return {
        "method": cost.method + sign(cost.method, signs),
        "GPUs": f"{cost.gpus:,}",
        "epsilon": "none" if cost.epsilon is None else f"{cost.epsilon:g}",
        "batch": format_number(cost.batch_size, ","),
        "noise": "none" if cost.epsilon is None else format_number(cost.noise_multiplier, ".3f"),
        "micro-batch": f"{cost.accumulation_steps:,} x {cost.micro_batch_size:,}"
        if cost.accumulation_steps
        else "",
        "GPU hours": hours if is_known or cost.accumulation_steps else "",
        "90 % interval": f"{low} to {high}" if is_known else "",
        "hours": three_digits(cost.gpu_hours, cost.gpus) if is_known else "",
        "price": format_number(cost.price, ",.2f") if is_known else "",
        "kWh": three_digits(cost.most_kwh) if is_known else "",
        "x standard": format_number(cost.hours_ratio, ".2f") if is_known else "",
    }


def _tell_cheapest(budget: Budget) -> list[str]:
    """Say which number of GPUs takes the fewest GPU hours; nothing for one number."""
    timed = [cost for cost in budget.methods if cost.private and cost.gpu_hours is not None]
    cheap = _find_best(budget.methods)
    if cheap is None or len({cost.gpus for cost in timed}) == 1:
        return []
    as_few = [c for c in timed if (c.cost_verdict, c.epsilon) == ("close", cheap.epsilon)]
    alike = [f"{cost.method} on {cost.gpus:,}" for cost in as_few]
    may_be = f"; {listed(alike)} may take as few" if alike else ""
    return [
        f"Fewest GPU hours: {cheap.method} on {cheap.gpus:,} {plural(cheap.gpus, 'GPU')}{may_be}."
    ]
