"""Which method to use: methods ranked by their predicted speed at the largest safe batch.

The ranking uses capacity results only. Memory is predicted storage by storage, time operator by
operator. No difference is predicted between methods where the 90 % interval of the ratio of their
times holds 1: they are called close. A method with a wrong gradient is never advised. A method
without a verdict, or with another mechanism than flat clipping, is advised and marked as such.
Where several ways of checkpointing were tried, each method is judged by the one with which it
trains fastest. What more GPUs bring is said of several such rankings.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from dpprof.experiments.config.mechanisms import NO_CLIPPING
from dpprof.experiments.config.tasks import name_units
from dpprof.experiments.records.advice import (
    WITHOUT_COLUMN,
    Advice,
    OneMoreSample,
    OnGpus,
    Option,
    Recommendation,
)
from dpprof.experiments.records.result import PredictedTime, Result
from dpprof.experiments.records.verdict import Standing
from dpprof.results.analysis.advice.ratios import Ratio, compare, split
from dpprof.results.analysis.collection import Collected
from dpprof.results.analysis.groups import setting_key
from dpprof.results.analysis.standings import UNKNOWN
from dpprof.results.analysis.tables.axes import BASELINE, WITHOUT_BATCH, axes_of
from dpprof.system.files import canonical_json

BEST = "best"  # a value of `Advice.checkpointing`: the fastest of several ways, for each method
_SHARED_AXES = (
    *("lora", "parallel", "seq_len", "image_size", "dtype", "optimizer"),
    *("checkpointing", "execution", "head", "loop", "noise_strategy"),
)


def advise(results: Sequence[Result], standings: Mapping[str, Standing]) -> Advice:
    """Rank the methods of capacity results that differ only in the method and in checkpointing.

    A failed result becomes an option that does not work. Standings are by the id of a result's
    experiment.
    """
    experiment = results[0].experiment
    described = [(r, describe(r, standings.get(r.experiment_id, UNKNOWN))) for r in results]
    results, options = _choose_checkpointing(described)
    ranked = [o for o in options if o.verdict == "unranked" and o.tokens_per_s is not None]
    fastest = max(ranked, key=lambda option: option.tokens_per_s or 0.0, default=None)
    plain = next((option for option in options if option.method == BASELINE), None)
    judged = [_judge(option, fastest, plain) for option in options]
    judged.sort(key=lambda o: (not o.private, o.verdict == "wrong", -(o.tokens_per_s or 0.0)))
    advised = [result for result, option in zip(results, options, strict=True) if option is fastest]
    axes = axes_of(experiment)
    predicted = (r.time.predicted_step_s for r in (*advised, *results) if r.time is not None)
    step = next(filter(None, predicted), None)
    shared: dict[str, Any] = {name: axes[name] for name in _SHARED_AXES}
    if any(option.tokens_per_s_by_checkpointing for option in options):
        shared["checkpointing"] = BEST
        tried = (o for _, o in described if fastest is not None and o.method == fastest.method)
        shared["without_checkpointing"] = next(
            (o for o in tried if o.checkpointing == "none"), None
        )
    if len({option.execution for option in options}) > 1:
        shared["execution"] = "default"
    return Advice(
        model=experiment.model_name,
        gpus=experiment.world_size,
        target=axes["target"] or "this machine",
        budget_bytes=next((r.capacity.budget_bytes for r in results if r.capacity), None),
        options=tuple(judged),
        one_more_sample=_add_sample(advised[0]) if advised else None,
        sure_of_memory=(
            "peaks are sums over every storage of a traced step; on a CPU they equal the measured "
            "peak to the byte, on a GPU the memory of libraries is modelled"
        ),
        rests_on={} if step is None else dict(step.rests_on),
        sure_of_time=_explain_time(results, step),
        **shared,
    )


def list_advice(collected: Collected) -> list[dict[str, Any]]:
    """Return one row per option of every model, sequence length and target, best first."""
    rows = []
    for setting, results in group_capacities(collected):
        advice = advise(results, collected.standings)
        common = setting | {"budget_bytes": advice.budget_bytes}
        rows += [common | option.model_dump(exclude=WITHOUT_COLUMN) for option in advice.options]
    return rows


def group_capacities(collected: Collected) -> Iterator[tuple[dict[str, Any], list[Result]]]:
    """Yield the axes of each setting with capacity results, and one of these for each method.

    Bounds and noise change no capacity.
    """
    alike: dict[str, dict[str, Result]] = defaultdict(dict)
    for _, result in collected.runs:
        if result.instrument == "capacity":
            of_method = alike[setting_key(result.experiment)]
            kept = of_method.setdefault(result.experiment.method, result)
            if kept.outcome != "ok":
                of_method[result.experiment.method] = result
    for results in alike.values():
        axes = axes_of(next(iter(results.values())).experiment)
        yield {name: axes[name] for name in WITHOUT_BATCH}, [*results.values()]


def _choose_checkpointing(
    described: Sequence[tuple[Result, Option]],
) -> tuple[list[Result], list[Option]]:
    """Return the fastest way of checkpointing, of results that differ in nothing else."""
    alike: dict[str, list[tuple[Result, Option]]] = defaultdict(list)
    for result, option in described:
        fields = result.experiment.model_dump(mode="json", exclude={"checkpointing"})
        alike[canonical_json(fields)].append((result, option))
    chosen = []
    for ways in alike.values():
        best, option = max(ways, key=lambda way: _fitness(way[1]))
        if len(ways) > 1:
            speeds = {str(way.checkpointing): way.tokens_per_s for _, way in ways}
            option = option.model_copy(update={"tokens_per_s_by_checkpointing": speeds})
        chosen.append((best, option))
    return [result for result, _ in chosen], [option for _, option in chosen]


def _fitness(option: Option) -> tuple[float, int, int, bool, bool]:
    """Rank ways of checkpointing; of those that do not fit, those that need less come first."""
    return (
        option.tokens_per_s or 0.0,
        option.safe_batch_size or 0,
        option.largest_batch_size or 0,
        option.verdict == "does not fit",
        option.largest_batch_size is None and option.checkpointing != "none",
    )


def _add_sample(result: Result) -> OneMoreSample | None:
    """Say what one more sample costs beyond the batch that a result states, and what binds."""
    capacity, memory = result.capacity, result.memory
    if capacity is None or memory is None or memory.at_peak is None:
        return None
    at_peak, size = memory.at_peak, capacity.stated_batch_size
    peaks = dict(capacity.estimates)
    if memory.peak_allocated_bytes is not None:
        peaks[size] = memory.peak_allocated_bytes
    beyond = sorted(samples for samples in peaks if samples > size)
    # Peaks are convex: the line from at most this batch to the next known one holds in between.
    within = sorted(samples for samples in peaks if samples <= size)
    ends = within[-1 if beyond else -2 :] + beyond[:1]
    total = sum(at_peak.components.values())
    if len(ends) == 1 or not total:
        return None
    low, high = ends
    largest = sorted(at_peak.components.items(), key=lambda part: part[1], reverse=True)
    return OneMoreSample(
        sample_bytes=round((peaks[high] - peaks[low]) / (high - low)),
        phase=at_peak.phase,
        peak_shares={name: held / total for name, held in largest if held},
    )


def describe(result: Result, standing: Standing = UNKNOWN) -> Option:
    """Return a method's option, with what speaks against it; ``_judge`` adds the speed verdict."""
    experiment, capacity, compute = result.experiment, result.capacity, result.compute
    private = experiment.method != BASELINE and standing.mechanism != NO_CLIPPING
    fields: dict[str, Any] = {"method": experiment.method, "private": private}
    fields |= {"mechanism": standing.mechanism, "verified": standing.verified}
    fields |= {"checkpointing": experiment.checkpointing, "execution": experiment.execution}
    if capacity is None or compute is None:
        return Option(
            verdict="does not fit" if result.outcome == "oom" else "failed",
            message=result.error.message if result.error else result.outcome,
            **fields,
        )
    tight = capacity.safe_batch_size is None
    bound_s = None if tight else compute.roofline_step_s
    step = None if tight or result.time is None else result.time.predicted_step_s
    samples = experiment.accumulation * capacity.stated_batch_size
    tokens = experiment.accumulation * experiment.tokens_in(capacity.stated_batch_size)
    tokens *= experiment.world_size
    verdict: Recommendation = "unranked" if private else "baseline"
    message = None
    if tight:
        verdict = "tight" if private else verdict
        message = "it fits, but with nothing to spare: see capacity"
    if private and standing.verified is False:
        verdict, message = "wrong", f"its gradient is wrong: {standing.reason}"
    same = {"smallest_batch_size", "safe_batch_size", "safe_peak_bytes", "limited_by"}
    return Option(
        verdict=verdict,
        largest_batch_size=capacity.batch_size,
        largest_peak_bytes=capacity.peak_bytes,
        parts=None if tight else split(result),
        sample_s=step and step.each_sample(samples),
        update_s=step and step.update,
        tokens_per_s=step and tokens / step.median,
        tokens_per_s_low=step and tokens / step.high,
        tokens_per_s_high=step and tokens / step.low,
        tokens_per_s_at_most=tokens / bound_s if bound_s else None,
        dp_flop_multiplier=compute.dp_flop_multiplier,
        message=message,
        **capacity.model_dump(include=same),
        **fields,
    )


def _judge(option: Option, fastest: Option | None, plain: Option | None) -> Option:
    """Add the ratios of a method's time to those of the fastest and of plain training."""
    over_first, over_plain = (compare_options(option, other) for other in (fastest, plain))
    ratios: dict[str, Any] = over_first.named("over_first") | over_plain.named("over_plain")
    ratios["ratio_reason"] = over_first.reason or over_plain.reason
    if option.verdict == "unranked" and over_first.value is not None:
        differs: Recommendation = "close" if over_first.holds_one else "slower"
        ratios["verdict"] = "first" if option is fastest else differs
    return option.model_copy(update=ratios)


def compare_options(option: Option | OnGpus, other: Option | OnGpus | None) -> Ratio:
    """Return a method's time of a token, or an image, on one GPU over that of another option."""
    if other is None:
        return Ratio(None, reason="there is nothing to compare with")
    unknown = [each.method for each in (option, other) if each.parts is None]
    return compare(option.parts, other.parts, f"no time is predicted of {' and '.join(unknown)}")


def _explain_time(results: Sequence[Result], step: PredictedTime | None) -> str:
    if step is None and all(result.capacity is None for result in results):
        return "not predicted: nothing fits"
    if step is None:
        why = (result.reasons["time"] for result in results if "time" in result.reasons)
        return next(why, "not predicted: no speeds of this device are known")
    units = name_units(results[0].experiment.image_size)
    rests = ", ".join(f"{share:.0%} {basis}" for basis, share in step.rests_on.items())
    return (
        f"{units} per second are predicted, with 90 % intervals; no difference is predicted "
        "between methods where that of the ratio of their times holds 1. Of the device's time, "
        f"{rests}. Published steps of plain training took longer than predicted: "
        "docs/numbers/step-time.md"
    )


def compare_gpus(advices: Iterable[Advice]) -> list[OnGpus]:
    """Compare numbers of GPUs for each method, the fewest GPUs first.

    Every number of GPUs trains with the largest safe batch of each. Efficiency is the speed of a
    GPU over that with the fewest GPUs on which the method has a predicted speed. ``advices`` are
    for different numbers of ranks and equal otherwise.
    """
    same = {"method", "private", "safe_batch_size"}
    same |= {"tokens_per_s", "tokens_per_s_low", "tokens_per_s_high"}
    compared: list[OnGpus] = []
    first: dict[str, tuple[int, float]] = {}
    for advice in sorted(advices, key=lambda advice: advice.gpus):
        for option in advice.options:
            speed = option.tokens_per_s
            if speed is None or not option.safe_batch_size or option.verdict == "wrong":
                continue
            each = speed / advice.gpus
            fewest, reference = first.setdefault(option.method, (advice.gpus, each))
            compared.append(
                OnGpus(
                    gpus=advice.gpus,
                    tokens_per_s_per_gpu=each,
                    efficiency=each / reference,
                    fewest_gpus=fewest,
                    gpu_hours_per_billion=hours_of_billion(each),
                    parts=option.parts,
                    **option.model_dump(include=same),
                )
            )
    return compared


def hours_of_billion(tokens_per_s_per_gpu: Any) -> Any:
    """Return the GPU hours for a billion tokens, at the speed of each GPU: one, or a column."""
    return 10**9 / tokens_per_s_per_gpu / 3600


def find_fastest(options: Sequence[OnGpus]) -> list[OnGpus]:
    """Return for each number of GPUs the fastest private method."""
    private = [option for option in options if option.private]
    return [
        max((o for o in private if o.gpus == size), key=lambda option: option.tokens_per_s)
        for size in dict.fromkeys(option.gpus for option in private)
    ]


def find_as_cheap(options: Sequence[OnGpus]) -> list[OnGpus]:
    """Return the cheapest of several numbers of GPUs, then those that may be as cheap."""
    cheapest = min(options, key=lambda option: option.gpu_hours_per_billion)
    others = (option for option in options if option is not cheapest)
    return [cheapest, *filter(lambda other: compare_options(other, cheapest).holds_one, others)]
