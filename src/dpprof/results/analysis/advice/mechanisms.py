"""What correlated noise costs in GPU hours, where the sum over steps has independent noise's noise.

As for another epsilon, steps stay and the batch changes: the less noise, the fewer samples a step.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from dpprof.experiments.accounting.plan import NoiseOfMechanism, NoisePlan, bands_of
from dpprof.experiments.config.privacy import Privacy
from dpprof.experiments.records.budget import MechanismCost, Mechanisms, MethodCost
from dpprof.experiments.records.result import Result
from dpprof.experiments.records.verdict import Standing
from dpprof.results.analysis.advice.advice import advise, describe
from dpprof.results.analysis.advice.budget import compare_hours, price_method

_TOO_LARGE = (
    "its past noise is more than the GPU's memory; noise_buffers='cpu' keeps it on the host, of "
    "which no time is predicted"
)
_SHARED = {"model", "seq_len", "image_size", "dtype", "optimizer", "target", "rests_on"}


def count_buffers(result: Result, bands: int) -> int | None:
    """Return the bytes that past noise of so many bands takes on each GPU; None where unknown."""
    if result.model is None:
        return None
    experiment = result.experiment
    width = 8 if experiment.dtype == "float64" else 4
    return (bands - 1) * width * -(-result.model.parameters_trainable // experiment.shards)


def exceed_memory(result: Result, bands: int) -> bool:
    """Tell whether past noise alone is more than there is room for."""
    needed, capacity = count_buffers(result, bands), result.capacity
    return needed is not None and capacity is not None and needed > capacity.budget_bytes


def price_mechanisms(
    results: Mapping[int, Result],
    privacy: Privacy,
    noise: NoisePlan,
    planned: Sequence[NoiseOfMechanism],
    standing: Standing,
) -> Mechanisms:
    """Price mechanisms, with the noise that is ``planned``, for capacity results of one method.

    ``results`` are by the number of bands, of which one is independent noise; ``bisr`` keeps and
    reads as much past noise as ``banded``. There is none of bands that ``exceed_memory``, or that
    have a reason. ``noise`` is what the budget asks for with independent noise; ``standing`` is
    the method's.
    """
    alone = results[1]
    epsilon = privacy.epsilon[0]

    def price(result: Result, mechanism: NoiseOfMechanism) -> MethodCost:
        plan = mechanism.at_epsilon(epsilon)
        return price_method(describe(result, standing), result, privacy, noise, plan)

    as_planned = NoiseOfMechanism(mechanism="independent", batch_size=noise.batch_size)
    plain = price(alone, as_planned)
    costs = []
    for mechanism in planned:
        bands = bands_of(mechanism.mechanism)
        fields: dict[str, Any] = {"buffers_bytes": count_buffers(alone, bands)}
        if bands in results:
            result = results[bands]
            cost, same = price(result, mechanism), price(result, as_planned)
            hours = {"micro_batch_size", "gpu_hours", "gpu_hours_low", "gpu_hours_high", "price"}
            fields |= cost.model_dump(include=hours) | compare_hours(cost, plain).named(
                "hours_ratio"
            )
            fields["safe_batch_size"] = result.capacity and result.capacity.safe_batch_size
            fields["same_batch_gpu_hours"] = same.gpu_hours
            fields["message"] = cost.message
        else:
            fields["message"] = mechanism.reason or _TOO_LARGE
        costs.append(MechanismCost(**mechanism.model_dump(), **fields))
    shared = advise([alone], {alone.experiment_id: standing}).model_dump(include=_SHARED)
    return Mechanisms(
        **shared,
        method=alone.experiment.method,
        privacy=privacy,
        warnings=privacy.warnings,
        noise=noise,
        mechanisms=costs,
    )
