"""Say what a privacy budget costs with each method: noise, steps, GPU hours and money."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar, overload

from pydantic import ValidationError

from dpprof.ask.answer import BatchAnswer, DataFrame, Figure, load_figure, tabulate
from dpprof.ask.budget_text import detail_budget, explain_choice, format_budget, tell_price
from dpprof.ask.capacities import find_capacities, list_experiments, read_verdicts
from dpprof.ask.commands.capacities import ask, make_parser, print_answer, read_question
from dpprof.ask.commands.common import ending_in_a_sentence
from dpprof.ask.commands.options import add_privacy_options
from dpprof.ask.defaults import CAPTURED
from dpprof.ask.mechanisms import ALL, PricedMechanisms, price, read_mechanisms
from dpprof.ask.questions import naming
from dpprof.experiments.accounting.plan import NoisePlan
from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.privacy import Privacy
from dpprof.experiments.config.validation import InputError, explain, refuse, spell
from dpprof.experiments.launch.accounting_run import account_once
from dpprof.experiments.records.budget import Budget
from dpprof.experiments.records.result import Result
from dpprof.results.analysis.advice.budget import make_budget
from dpprof.results.analysis.tables.axes import axes_of
from dpprof.system.console import say


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
        """What the best method takes, and which batch is used, by which rule."""
        chosen = explain_choice(self.budget.privacy, self.budget.noise)
        return f"{tell_price(self.budget)} {chosen}"

    @property
    def fits(self) -> bool:
        """Whether a batch safely fits with any method."""
        return any(cost.accumulation_steps for cost in self.budget.methods)

    def __str__(self) -> str:
        return format_budget(self.budget)

    @property
    def details(self) -> str:
        """The noise of other batches, every method at every epsilon, and what it rests on."""
        return detail_budget(self.budget)

    def table(self) -> DataFrame:
        """Return a row for each method and epsilon, the fastest method first."""
        return tabulate(cost.model_dump() for cost in self.budget.methods)

    def plot(self) -> Figure:
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


@overload
def budget(model: Any, *, mechanism: None = None, **options: Any) -> Priced: ...


@overload
def budget(model: Any, *, mechanism: str | Sequence[str], **options: Any) -> PricedMechanisms: ...


def budget(
    model: str | dict[str, Any] | Callable[[Experiment], Any],
    *,
    methods: Sequence[str] | None = None,
    world_sizes: Sequence[int] | None = None,
    mechanism: str | Sequence[str] | None = None,
    again: bool = False,
    **options: Any,
) -> Priced | PricedMechanisms:
    """Say what a privacy budget costs with each method on a GPU, or with each mechanism.

    Args:
        model: The model, as ``estimate`` takes it.
        methods: The methods to compare; all of them by default.
        world_sizes: The numbers of ranks to compare.
        mechanism: ``independent`` noise, ``banded-8`` or ``bisr-8``, with so many bands, a list of
            such, or ``all``: compare these, with the fastest of the methods.
        again: Whether to ignore what is kept, in results and the package.
        **options: Every other option of ``dpprof budget``: those of an experiment, and ``samples``,
            ``tokens``, ``epsilon`` (one or a list) ...

    Raises:
        InputError: A value is not allowed or given twice, a required one is missing, or no noise
            is known for the budget.

    Example:
        >>> import dpprof
        >>> spent = {"samples": 50_000, "tokens": 32e6, "epsilon": 8}
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
    names = [] if mechanism is None else read_mechanisms(mechanism, privacy)
    if (strategy := stated.get("noise_strategy")) is not None:
        raise refuse(spell("noise_strategy"), strategy, f"give {spell('mechanism')} {strategy}")
    if names and world_sizes is not None:
        why = f"{spell('mechanism')} is about one number of ranks; give {spell('parallel')}"
        raise refuse(spell("world_sizes"), " ".join(map(str, world_sizes)), why)
    with naming({"model": model, **stated}) as fields:
        compared = CAPTURED if names and methods is None else methods
        asked = list_experiments(fields, compared, world_sizes)
        tokens = asked[0].tokens_per_sample
        privacy.refuse_few_tokens(tokens, spell("tokens"))
        for warning in privacy.warnings:
            say(f"warning: {warning}")
        standings = read_verdicts(asked)
        results, noise = _find(asked, privacy, tokens, again=again)
        if names:
            return price(fields, results, names, privacy, noise, standings=standings, again=again)
        return Priced(make_budget(results, standings, privacy, noise), asked[0])


def _find(
    asked: Sequence[Experiment], privacy: Privacy, tokens: float, *, again: bool
) -> tuple[list[Result], NoisePlan]:
    """Find capacities, and beside them the noise of a budget; refuse one without known noise."""

    def plan() -> NoisePlan:
        [noise] = account_once(Path(), privacy, [tokens], again=again)
        if noise.planned.noise_multiplier is None:
            raise InputError(f"{spelt}: {noise.planned.reason}")
        return noise

    spelt = spell("epsilon")  # which depends on the thread
    with ThreadPoolExecutor(1) as pool:
        planning = pool.submit(plan)
        return find_capacities(asked, Path(), again=again, beside=planning), planning.result()


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line; the exit status is 1 where no method safely fits."""
    example = " --samples 1e6 --tokens 2e9 --epsilon 8"
    parser = make_parser("budget", __doc__, example)
    parser.add_argument(
        "--mechanism",
        nargs="+",
        metavar="NAME",
        help=f"compare mechanisms: {ALL}, or some of independent, banded-8 or bisr-8, with so many "
        "bands",
    )
    add_privacy_options(parser)
    arguments = parser.parse_args(argv)
    privacy = {name: getattr(arguments, name) for name in ("mechanism", *Privacy.model_fields)}
    with ending_in_a_sentence():
        print_answer(ask(budget, read_question(arguments) | privacy), arguments)
