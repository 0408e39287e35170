"""Say what correlated noise brings and costs beside independent noise, for a privacy budget."""

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

from dpprof.ask.answer import BatchAnswer, DataFrame, Figure, load_figure, tabulate
from dpprof.ask.budget_text import explain_choice
from dpprof.ask.capacities import find_capacities, list_experiments
from dpprof.ask.layout import (
    explain_trust,
    fit_screen,
    format_number,
    group_messages,
    lay_out,
    name_settings,
)
from dpprof.experiments.accounting.plan import (
    MOMENTUM,
    NoisePlan,
    bands_of,
    explain_impossible,
    momentum_of,
)
from dpprof.experiments.config.privacy import Privacy
from dpprof.experiments.config.refusals import INDEPENDENT, refuse_strategy
from dpprof.experiments.config.tasks import name_size
from dpprof.experiments.config.validation import refuse, spell
from dpprof.experiments.launch.accounting_run import account_mechanisms_once
from dpprof.experiments.records.budget import MechanismCost, Mechanisms
from dpprof.experiments.records.result import Result
from dpprof.experiments.records.verdict import Standing
from dpprof.results.analysis.advice.advice import describe
from dpprof.results.analysis.advice.mechanisms import exceed_memory, price_mechanisms
from dpprof.system.words import three_digits

ALL = "all"
_BANDS = (4, 8, 16, 32)
_EVERY = (INDEPENDENT, *(f"{noise}-{bands}" for noise in ("banded", "bisr") for bands in _BANDS))
"""What ``all`` stands for."""

_OF_NOISE = (
    "Noise with the planned batch: multiplier; of a step, of the sum over steps (SGD) and with "
    f"momentum {MOMENTUM}, over independent noise's. GiB: past noise; fits: samples at a time."
)
_OF_HOURS = "Batch, GPU hours: sums have independent noise's noise, as many steps of fewer samples."
_OF_ADAM = "AdamW reads single steps, whose noise grows: try what it gains of less noise in sums."


class PricedMechanisms(BatchAnswer):
    """The price of each mechanism; ``mechanisms`` has every figure."""

    _short: ClassVar = (
        *("mechanism", "noise_multiplier", "sum_noise", "buffers_bytes", "batch_size"),
        *("gpu_hours", "gpu_hours_low", "gpu_hours_high", "price", "hours_ratio"),
    )

    def __init__(self, mechanisms: Mechanisms) -> None:
        self.mechanisms = mechanisms

    @property
    def sentence(self) -> str:
        """What the best mechanism takes, and what independent noise does."""
        asked = self.mechanisms
        timed = [cost for cost in asked.mechanisms if cost.gpu_hours is not None]
        if not timed:
            return f"No hours are known of {asked.method}."
        best = min(timed, key=lambda cost: cost.gpu_hours or 0.0)
        plain = next((cost for cost in timed if cost.mechanism == INDEPENDENT), None)
        low, hours, high = map(
            three_digits, (best.gpu_hours_low, best.gpu_hours, best.gpu_hours_high)
        )
        price = "" if best.price is None else f", price {best.price:,.2f}"
        text = f"{best.mechanism}: {hours} GPU hours ({low} to {high} at 90 %){price}"
        if plain is not None and plain is not best:
            ratio = format_number(best.hours_ratio, ".2f")
            text += (
                f", {ratio} times the {three_digits(plain.gpu_hours)} of independent noise, with "
                "as much noise in the sum over steps"
            )
        return f"{text} ({name_settings(asked.method, asked.dtype, asked.optimizer)})."

    @property
    def fits(self) -> bool:
        """Whether a batch safely fits with any mechanism."""
        return any(cost.micro_batch_size for cost in self.mechanisms.mechanisms)

    def __str__(self) -> str:
        asked = self.mechanisms
        planned, privacy = asked.noise.planned, asked.privacy
        training = (
            f"{asked.model}, {name_size(asked.seq_len, asked.image_size)}, on {asked.target}, "
            f"({privacy.epsilon[0]:g}, {privacy.delta:g})-DP: {planned.steps:,} steps, planned "
            f"with {planned.batch_size:,} samples each."
        )
        notes = [_OF_NOISE, _OF_HOURS, *[_OF_ADAM] * asked.optimizer.startswith("adam")]
        rows = [_list_cells(cost, asked.mechanisms[0]) for cost in asked.mechanisms]
        hidden = set() if privacy.price_per_hour is not None else {"price"}
        header = [name for name in rows[0] if name not in hidden]
        table = lay_out([header, *([row[name] for name in header] for row in rows)])
        return fit_screen([self.sentence, training], table, [*notes, explain_trust(asked.rests_on)])

    @property
    def details(self) -> str:
        """Why figures are missing, how samples are drawn, and which accountant tells the noise."""
        asked = self.mechanisms
        drawn = [
            f"{cost.mechanism}: steps draw from {cost.folds:,} "
            f"{'folds in turn' if cost.folds > 1 else 'fold'}; noise by {cost.accountant}; with "
            f"the planned batch {three_digits(cost.same_batch_gpu_hours)} GPU hours."
            for cost in asked.mechanisms
            if cost.noise_multiplier is not None
        ]
        missing = group_messages((cost.mechanism, cost.message) for cost in asked.mechanisms)
        return "\n".join([explain_choice(asked.privacy, asked.noise), *missing, *drawn])

    def table(self) -> DataFrame:
        """Return a row for each mechanism."""
        return tabulate(cost.model_dump() for cost in self.mechanisms.mechanisms)

    def plot(self) -> Figure:
        """Draw GPU hours and noise by mechanism.

        Raises:
            InputError: Matplotlib is not installed.
            NothingToDrawError: No hours are predicted.
        """
        return load_figure("prices:draw_mechanisms", "plot")({"mechanisms": self.table()})

    def to_json(self) -> str:
        """Return the budget and its price with each mechanism."""
        return self.mechanisms.model_dump_json(indent=1)


def _list_cells(cost: MechanismCost, plain: MechanismCost) -> dict[str, str]:
    def over(name: str) -> str:
        mine, other = getattr(cost, name), getattr(plain, name)
        return format_number(mine and other and mine / other, ".2f", "")

    is_known = cost.gpu_hours is not None
    low, high, hours = map(three_digits, (cost.gpu_hours_low, cost.gpu_hours_high, cost.gpu_hours))
    return {
        "mechanism": cost.mechanism,
        "noise": format_number(cost.noise_multiplier, ".3f"),
        "step": over("step_noise"),
        "sum": over("sum_noise"),
        "momentum": over("momentum_noise"),
        "GiB": three_digits(cost.buffers_bytes, 2**30),
        "fits": format_number(cost.safe_batch_size, ",", "no"),
        "batch": format_number(cost.batch_size, ",", ""),
        "hours": hours if is_known else "",
        "90 %": f"{low} to {high}" if is_known else "",
        "price": format_number(cost.price, ",.2f", ""),
        "times": format_number(cost.hours_ratio, ".2f", ""),
    }


def read_mechanisms(mechanism: str | Sequence[str], privacy: Privacy) -> list[str]:
    """Return the mechanisms that are asked about, independent noise first.

    Raises:
        InputError: One is not known, or given twice; or there are several epsilons.
    """
    asked = [mechanism] if isinstance(mechanism, str) else list(mechanism)
    if len(privacy.epsilon) > 1:
        epsilons = " ".join(f"{epsilon:g}" for epsilon in privacy.epsilon)
        raise refuse(spell("epsilon"), epsilons, f"{spell('mechanism')} is about one")
    if asked == [ALL]:
        return list(_EVERY)
    for name in asked:
        try:
            refuse_strategy(name)
        except ValueError as error:
            raise refuse(spell("mechanism"), name, f"{error}; {ALL} tries several") from None
    return list(dict.fromkeys([INDEPENDENT, *asked]))


def price(
    fields: Mapping[str, Any],
    results: Sequence[Result],
    names: Sequence[str],
    privacy: Privacy,
    noise: NoisePlan,
    *,
    standings: Mapping[str, Standing],
    again: bool,
) -> PricedMechanisms:
    """Price mechanisms by the method that takes the fewest hours with independent noise.

    ``results`` are capacities with that.
    """
    alone = _choose(results, standings)
    able = [n for n in names if not explain_impossible(n, noise.planned, privacy.samples)]
    bands = sorted({bands_of(name) for name in able} - {1})
    rest = [number for number in bands if not exceed_memory(alone, number)]
    further = [
        experiment
        for number in rest
        for experiment in list_experiments(
            {**fields, "noise_strategy": f"banded-{number}"}, [alone.experiment.method]
        )
    ]
    with ThreadPoolExecutor(1) as pool:
        planning = pool.submit(
            account_mechanisms_once,
            *(Path(), privacy, noise.planned, names),
            momentum=momentum_of(alone.experiment.optimizer),
            again=again,
        )
        capacities = find_capacities(further, Path(), again=again) if further else []
        planned = planning.result()
    by_bands = {1: alone, **dict(zip(rest, capacities, strict=True))}
    standing = standings[alone.experiment_id]
    prices = price_mechanisms(by_bands, privacy, noise, planned, standing)
    return PricedMechanisms(prices)


def _choose(results: Sequence[Result], standings: Mapping[str, Standing]) -> Result:
    """Return the result of the fastest method; of none that is timed, of the largest batch."""

    def fitness(result: Result) -> tuple[float, int]:
        option = describe(result, standings[result.experiment_id])
        is_right = option.private and option.verified is not False
        return is_right * (option.tokens_per_s or 0.0), option.safe_batch_size or 0

    return max(results, key=fitness)
