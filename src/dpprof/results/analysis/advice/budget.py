"""What a privacy budget costs in GPU hours: tables ``budget`` and ``noise``.

A step of an expected batch runs micro-batches of the size that safely fits, then noise and
optimizer once. Poisson-sampled batches vary; hours are those of the expected number of samples.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from dpprof.experiments.accounting.plan import AtEpsilon, NoiseOfMechanism, NoisePlan, momentum_of
from dpprof.experiments.config import registry
from dpprof.experiments.config.datasheets import find_watts
from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.privacy import Privacy
from dpprof.experiments.config.refusals import INDEPENDENT
from dpprof.experiments.records.advice import Advice, Option
from dpprof.experiments.records.budget import Budget, MethodCost
from dpprof.experiments.records.result import Result
from dpprof.experiments.records.verdict import Standing
from dpprof.results.analysis.advice.advice import advise, group_capacities
from dpprof.results.analysis.advice.ratios import Ratio, accumulate, compare
from dpprof.results.analysis.collection import Collected
from dpprof.results.analysis.tables.axes import BASELINE


@dataclasses.dataclass(frozen=True)
class Planned:
    """A privacy budget, and the noise for it, by the tokens of a sample."""

    privacy: Privacy
    plans: Mapping[float, NoisePlan] = dataclasses.field(default_factory=dict)
    reason: str | None = None  # why there are no plans
    mechanisms: Mapping[tuple[float, float, str], NoiseOfMechanism] = dataclasses.field(
        default_factory=dict
    )
    """The noise of correlated noise, by tokens of a sample, momentum and name."""

    def plan_for(self, experiment: Experiment) -> NoisePlan | None:
        """Return the noise for an experiment; of correlated noise at the first epsilon alone."""
        tokens = experiment.tokens_per_sample
        plan, name = self.plans.get(tokens), experiment.noise_strategy
        if plan is None or name == INDEPENDENT:
            return plan
        noise = self.mechanisms.get((tokens, momentum_of(experiment.optimizer), name))
        if noise is None:
            return None
        return plan.model_copy(update={"epsilons": [noise.at_epsilon(self.privacy.epsilon[0])]})


def make_budget(
    results: Sequence[Result],
    standings: Mapping[str, Standing],
    privacy: Privacy,
    noise: NoisePlan,
) -> Budget:
    """Price a privacy budget for capacity results that differ in the method and in ranks alone.

    A failed result becomes a method without hours. Standings are by the id of a result's
    experiment. ``noise`` is what the budget asks for.
    """
    by_gpus: dict[int, list[Result]] = defaultdict(list)
    for result in results:
        by_gpus[result.experiment.world_size].append(result)
    advices = [advise(alike, standings) for alike in by_gpus.values()]
    costs = [
        cost
        for alike, advice in zip(by_gpus.values(), advices, strict=True)
        for cost in _price_methods(alike, advice, privacy, noise)
    ]
    first_timed = max(advices, key=lambda advice: advice.best is not None)
    shared = first_timed.model_dump(include=set(Budget.model_fields))
    if first_timed.best is not None and first_timed.best.execution is not None:
        shared["execution"] = first_timed.best.execution
    return Budget(
        **shared,
        privacy=privacy,
        warnings=privacy.warnings,
        noise=noise,
        methods=_judge(costs),
    )


def _judge(costs: Sequence[MethodCost]) -> list[MethodCost]:
    """Add the ratios of hours to the fewest hours of a private method, at the same epsilon."""
    able = [c for c in costs if c.private and c.verified is not False and c.gpu_hours is not None]
    judged = []
    for cost in costs:
        alike = [other for other in able if other.epsilon == cost.epsilon]
        cheapest = min(alike, key=lambda other: other.gpu_hours or 0.0, default=None)
        ratio = compare_hours(cost, cheapest)
        fields: dict[str, Any] = ratio.named("over_cheapest")
        if cost in able:
            differs = "close" if ratio.holds_one else "slower"
            fields["cost_verdict"] = "first" if cost is cheapest else differs
        judged.append(cost.model_copy(update=fields))
    return judged


def compare_hours(cost: MethodCost, other: MethodCost | None) -> Ratio:
    """Return the hours of a training over those of another."""
    if other is None or not cost.gpu_hours or not other.gpu_hours:
        return Ratio(None)
    ratio = compare(cost.parts, other.parts)
    return ratio.times(cost.gpu_hours / other.gpu_hours / (ratio.value or 1.0))


def _price_methods(
    results: Sequence[Result], advice: Advice, privacy: Privacy, noise: NoisePlan
) -> list[MethodCost]:
    by_method = {result.experiment.method: result for result in results}
    costs = [
        price_method(option, by_method[option.method], privacy, noise, plan)
        for option in advice.options
        for plan in (noise.epsilons if option.private else noise.epsilons[:1])
    ]
    plain = next((cost for cost in costs if cost.method == BASELINE), None)
    return [
        cost.model_copy(update=compare_hours(cost, plain).named("hours_ratio")) for cost in costs
    ]


def price_method(
    option: Option, result: Result, privacy: Privacy, noise: NoisePlan, plan: AtEpsilon
) -> MethodCost:
    """Price a training with one method at one epsilon."""
    noised = {"epsilon", "batch_size", "noise_multiplier", "same_batch_noise_multiplier"}
    plain = {"epsilon": None, "batch_size": noise.batch_size}
    cost = MethodCost(
        gpus=result.experiment.world_size,
        steps=noise.planned.steps,
        message=option.message or (plan.reason if option.private else None),
        **option.model_dump(include={"method", "private", "mechanism", "verified"}),
        **(plan.model_dump(include=noised) if option.private else plain),
    )
    capacity, step = result.capacity, None if result.time is None else result.time.predicted_step_s
    if capacity is None or capacity.safe_batch_size is None or cost.batch_size is None:
        return cost
    of_each = math.ceil(cost.batch_size / cost.gpus)
    accumulation = math.ceil(of_each / capacity.safe_batch_size)
    micro_batch_size = math.ceil(of_each / accumulation)
    if micro_batch_size < (least := capacity.smallest_batch_size):
        sizes = f"{micro_batch_size:,} samples, and it takes {least:,} or more"
        return cost.model_copy(
            update={"message": cost.message or f"micro-batches would have {sizes}"}
        )
    fits = {"accumulation_steps": accumulation, "micro_batch_size": micro_batch_size}
    if step is None:
        why = result.reasons.get("time", "no time is predicted for this target")
        return cost.model_copy(update=fits | {"message": cost.message or why})
    predicted_for = result.experiment.accumulation * capacity.stated_batch_size
    batches = of_each / predicted_for
    step_s = of_each * step.each_sample(predicted_for) + step.update
    hours = cost.gpus * noise.planned.steps * step_s / 3600
    price, watts = privacy.price_per_hour, find_watts(registry.find_gpu(result.experiment.target))
    smaller = f"of a batch of {predicted_for:,}: one so small may take longer a sample"
    return cost.model_copy(
        update=fits
        | {
            "step_s": step_s,
            "gpu_hours": hours,
            "gpu_hours_low": hours * step.low / step.median,
            "gpu_hours_high": hours * step.high / step.median,
            "price": None if price is None else price * hours,
            "most_kwh": None if watts is None else watts * hours / 1000,
            "parts": option.parts and accumulate(option.parts, batches),
            "message": cost.message or (f"time is predicted {smaller}" if batches < 1 else None),
        }
    )


def list_budget(collected: Collected, planned: Planned) -> list[dict[str, Any]]:
    """Return one row per method and epsilon of every setting with capacity results."""
    rows = []
    for setting, results in group_capacities(collected):
        plan = planned.plan_for(results[0].experiment)
        if plan is None:
            why = planned.reason or "its noise is not known"
            rows.append(setting | {"message": why})
            continue
        budget = make_budget(results, collected.standings, planned.privacy, plan)
        sizes = {r.experiment.method: r.model and r.model.parameters_total for r in results}
        rows += [
            setting | {"parameters_total": sizes[cost.method]} | cost.model_dump()
            for cost in budget.methods
        ]
    return rows


def list_noise(planned: Planned) -> list[dict[str, Any]]:
    """Return one row per batch size that a privacy budget was asked about."""
    privacy = planned.privacy
    asked = privacy.model_dump(include={"samples", "tokens", "delta", "accountant"})
    asked["epsilon"] = privacy.epsilon[0]
    return [
        asked
        | {"tokens_per_sample": plan.tokens_per_sample}
        | batch.model_dump()
        | {
            "accountant": batch.accountant or privacy.accountant,
            "chosen": batch.batch_size == plan.batch_size,
        }
        for plan in planned.plans.values()
        for batch in plan.batches
    ]
