"""Say what a privacy budget costs with each method: noise, steps, GPU hours and money."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import ValidationError

from dpprof.ask.answer import BatchAnswer, load_figure, tabulate
from dpprof.ask.capacities import find_capacities, list_experiments, read_verdicts
from dpprof.ask.commands.capacities import ask, make_parser, print_answer, read_question
from dpprof.ask.commands.common import ending_in_a_sentence
from dpprof.ask.commands.options import add_privacy_options
from dpprof.ask.layout import explain_signs, format_number, group_messages, lay_out
from dpprof.ask.questions import naming
from dpprof.experiments.accounting.plan import AtEpsilon, NoisePlan
from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.privacy import Privacy
from dpprof.experiments.config.tasks import name_size
from dpprof.experiments.config.validation import InputError, explain, spell
from dpprof.experiments.launch.accounting_run import account_once
from dpprof.experiments.records.budget import Budget, MethodCost
from dpprof.results.analysis.advice.budget import make_budget
from dpprof.results.analysis.standings import Marks, find_signs, sign
from dpprof.results.analysis.tables.axes import axes_of, target_text
from dpprof.results.report.wording import listed, plural
from dpprof.system.console import say
from dpprof.system.numbers import three_digits

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

_OF_NOISE = (
    "Noise: of a step, the noise multiplier over the batch; of the training, that over the root of "
    "the steps; in units of C. docs/numbers/budget.md"
)
_OF_HOURS = "GPU hours: of all GPUs together, for the expected samples of Poisson-sampled batches."


class Priced(BatchAnswer):
    """The price of a budget; ``budget`` has every figure (docs/numbers/budget.md)."""

    _short: ClassVar = (
        *("method", "epsilon", "batch_size", "steps", "noise_multiplier", "gpu_hours"),
        *("gpu_hours_low", "gpu_hours_high", "price", "hours_ratio"),
    )

    def __init__(self, budget: Budget, asked: Experiment) -> None:
        self.budget = budget
        self._asked = asked

    @property
    def sentence(self) -> str:
        """The budget, and which batch is used, by which rule."""
        first = str(self).splitlines()[0]
        return f"{first} {explain_choice(self.budget.privacy, self.budget.noise)}"

    @property
    def fits(self) -> bool:
        """Whether a batch safely fits with any method."""
        return any(cost.accumulation_steps for cost in self.budget.methods)

    def __str__(self) -> str:
        return format_budget(self.budget)

    def table(self) -> "pd.DataFrame":
        """Return a row for each method and epsilon, the fastest method first."""
        return tabulate(cost.model_dump() for cost in self.budget.methods)

    def plot(self) -> "Figure":
        """Draw GPU hours over epsilon.

        Raises:
            InputError: Matplotlib is not installed.
            NothingToDrawError: No hours are predicted.
        """
        table = self.table()
        setting = {k: v for k, v in axes_of(self._asked).items() if k not in table}
        budget = table.assign(**setting, parameters_total=1)
        return load_figure("prices:draw_budget", "plot")({"budget": budget})

    def to_json(self) -> str:
        """Return the budget and its price with each method."""
        return self.budget.model_dump_json(indent=1)


def budget(
    model: str | dict[str, Any] | Callable[[Experiment], Any],
    *,
    methods: Sequence[str] | None = None,
    world_sizes: Sequence[int] | None = None,
    again: bool = False,
    **options: Any,
) -> Priced:
    """Say what a privacy budget costs with each method on a GPU.

    Args:
        model: The model, as ``estimate`` takes it.
        methods: The methods to compare; all of them by default.
        world_sizes: The numbers of ranks to compare.
        again: Whether to ignore what is kept, in results and the package.
        **options: Every other option of ``dpprof budget``: those of an experiment, and ``samples``,
            ``tokens``, ``epsilon`` (one or a list), ``delta`` ...

    Raises:
        InputError: A value is not allowed or given twice, a required one is missing, or no noise
            is known for the budget.

    Example:
        >>> import dpprof
        >>> spent = {"samples": 50_000, "tokens": 32e6, "epsilon": 8, "delta": 1e-6}
        >>> where = {"target": "h100", "seq_len": 64, "accountant": "rdp"}
        >>> told = dpprof.budget("tiny", methods=["flash-bk"], **where, **spent)
        >>> told.budget.noise.planned.steps
        1954
    """
    stated = {name: value for name, value in options.items() if value is not None}
    spent = {name: stated.pop(name) for name in Privacy.model_fields if name in stated}
    try:
        privacy = Privacy.model_validate(spent)
    except ValidationError as error:
        raise explain(error, Privacy, options=True) from None
    with naming({"model": model, **stated}) as fields:
        asked = list_experiments(fields, methods, world_sizes)
        tokens = asked[0].tokens_per_sample
        privacy.refuse_few_tokens(tokens, spell("tokens"))
        for warning in privacy.warnings:
            say(f"warning: {warning}")
        [noise] = account_once(Path(), privacy, [tokens], again=again)
        if noise.planned.noise_multiplier is None:
            raise InputError(f"{spell('epsilon')}: {noise.planned.reason}")
        standings = read_verdicts(asked)
        results = find_capacities(asked, Path(), again=again)
        target = target_text(asked[0]) or "this machine"
        return Priced(make_budget(results, target, standings, privacy, noise), asked[0])


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
    rows = [_list_cells(cost, signs) for cost in budget.methods]
    hidden = set() if budget.privacy.price_per_hour is not None else {"price"}
    if all(cost.gpus == 1 for cost in budget.methods):
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
        "x standard": format_number(cost.hours_ratio, ".2f") if is_known else "",
    }


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
    as_few = [c for c in timed if (c.cost_verdict, c.epsilon) == ("close", cheap.epsilon)]
    alike = [f"{cost.method} on {cost.gpus:,}" for cost in as_few]
    may_be = f"; {listed(alike)} may take as few" if alike else ""
    return [
        f"Fewest GPU hours: {cheap.method} on {cheap.gpus:,} {plural(cheap.gpus, 'GPU')}{may_be}."
    ]


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


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line; the exit status is 1 where no method safely fits."""
    example = " --samples 1e6 --tokens 2e9 --epsilon 8 --delta 1e-7"
    parser = make_parser("budget", __doc__, example)
    add_privacy_options(parser)
    arguments = parser.parse_args(argv)
    privacy = {name: getattr(arguments, name) for name in Privacy.model_fields}
    with ending_in_a_sentence():
        print_answer(ask(budget, read_question(arguments) | privacy), arguments)
