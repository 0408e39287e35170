"""What `dpprof budget` says, as text."""

from dpprof.ask.layout import (
    explain_signs,
    format_number,
    group_messages,
    lay_out,
)
from dpprof.experiments.accounting.plan import AtEpsilon, NoisePlan
from dpprof.experiments.config.privacy import Privacy
from dpprof.experiments.config.tasks import name_size
from dpprof.experiments.records.budget import Budget, MethodCost
from dpprof.results.analysis.standings import Marks, find_signs, sign
from dpprof.results.report.wording import plural
from dpprof.system.numbers import three_digits

_OF_NOISE = (
    "Noise: of a step, the noise multiplier over the batch; of the training, that over the root of "
    "the steps; in units of C. docs/numbers/budget.md"
)


_OF_HOURS = "GPU hours: of all GPUs together, for the expected samples of Poisson-sampled batches."


def explain_choice(privacy: Privacy, noise: NoisePlan) -> str:
    """Say which batch is used, and by which rule."""
    planned = noise.planned
    lines = f"A batch of {noise.batch_size:,} samples is used, in {planned.steps:,} steps: "
    if privacy.batch_size is not None:
        return lines + "it was given."
    larger = [batch for batch in noise.batches if batch.batch_size == 2 * noise.batch_size]
    if larger and larger[0].steps >= privacy.least_steps:
        return lines + "a larger one takes at most 5 % off the noise of the training."
    if 2 * noise.batch_size > privacy.samples:
        return lines + "it is the largest power of two that the data allow."
    return lines + (
        f"it is the largest power of two that leaves at least {privacy.least_steps:,} steps "
        "(--least-steps). Noise falls while batches grow; how few steps suffice is yours to know."
    )


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


def _lay_out_costs(budget: Budget, signs: Marks) -> list[str]:
    header = ["method", "GPUs", "epsilon", "batch", "noise", "micro-batch", "GPU hours"]
    header += ["90 % interval", "hours", "price", "x standard"]
    hidden = set() if budget.privacy.price_per_hour is not None else {"price"}
    if all(cost.gpus == 1 for cost in budget.methods):
        hidden |= {"GPUs", "hours"}
    shown = [column for column, name in enumerate(header) if name not in hidden]
    rows = [header, *(_cells(cost, signs) for cost in budget.methods)]
    return lay_out([[row[column] for column in shown] for row in rows])


def _cells(cost: MethodCost, signs: Marks) -> list[str]:
    is_known = cost.gpu_hours is not None
    low, high, hours = map(three_digits, (cost.gpu_hours_low, cost.gpu_hours_high, cost.gpu_hours))
    return [
        cost.method + sign(cost.method, signs),
        f"{cost.gpus:,}",
        "none" if cost.epsilon is None else f"{cost.epsilon:g}",
        format_number(cost.batch_size, ","),
        "none" if cost.epsilon is None else format_number(cost.noise_multiplier, ".3f"),
        f"{cost.accumulation_steps:,} x {cost.micro_batch_size:,}"
        if cost.accumulation_steps
        else "",
        hours if is_known or cost.accumulation_steps else "",
        f"{low} to {high}" if is_known else "",
        three_digits(cost.gpu_hours, cost.gpus) if is_known else "",
        format_number(cost.price, ",.2f") if is_known else "",
        format_number(cost.hours_ratio, ".2f") if is_known else "",
    ]


def _explain_epsilon(plan: AtEpsilon, planned: AtEpsilon) -> str:
    """Say what another epsilon changes."""
    if plan.batch_size is None:
        return f"epsilon {plan.epsilon:g}: {plan.reason}"
    return (
        f"epsilon {plan.epsilon:g}: batches of {plan.batch_size:,} in as many steps have the noise "
        f"of epsilon {planned.epsilon:g} in each; with the same batch, hours stay and the noise "
        f"multiplier is {format_number(plan.same_batch_noise_multiplier, '.3f')}"
    )


def _find_cheapest(budget: Budget) -> list[str]:
    """Say which number of GPUs takes the fewest GPU hours; nothing for one number."""
    able = [cost for cost in budget.methods if cost.private and cost.verified is not False]
    timed = [cost for cost in able if cost.gpu_hours is not None]
    if len({cost.gpus for cost in timed}) < 2:  # noqa: PLR2004
        return []
    cheap = min(timed, key=lambda cost: cost.gpu_hours or 0.0)
    return [f"Fewest GPU hours: {cheap.method} on {cheap.gpus:,} {plural(cheap.gpus, 'GPU')}."]


def format_budget(budget: Budget) -> str:
    """Return what a budget costs as text."""
    privacy, noise = budget.privacy, budget.noise
    signs = find_signs(budget.methods)
    first, *others = noise.epsilons
    epochs = noise.planned.steps * noise.planned.sample_rate
    trained = "" if budget.lora is None else f" with LoRA ({budget.lora})"
    spent = f"({first.epsilon:g}, {privacy.delta:g})-DP by {privacy.accountant}"
    where = f"{name_size(budget.seq_len, budget.image_size)}, {budget.dtype}, on {budget.target}"
    data = f"{privacy.tokens:,} tokens are {epochs:,.3g} epochs of {privacy.samples:,} samples"
    lines = [
        f"{spent}: {budget.model}{trained}, {where}; {data}.",
        explain_choice(privacy, noise),
        *_lay_out_noise(noise),
        *_lay_out_costs(budget, signs),
        *(_explain_epsilon(plan, first) for plan in others),
    ]
    shown = {plan.reason for plan in others}
    lines += group_messages((m.method, m.message) for m in budget.methods if m.message not in shown)
    lines += explain_signs(signs)
    lines += _find_cheapest(budget)
    return "\n".join([*lines, _OF_NOISE, _OF_HOURS, f"Time: {budget.sure_of_time}."])
