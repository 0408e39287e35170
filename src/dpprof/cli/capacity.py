"""Say how large a batch fits on a GPU that need not be here, for every method."""

import json
from collections.abc import Sequence

from dpprof.cli.capacities import answer, make_parser, say_smallest_batch, tell_smallest
from dpprof.records.result import Capacity, Result
from dpprof.spec.experiment import Experiment

_MIB = 2**20


def describe(result: Result) -> dict[str, object]:
    """Spell what was found for a method, for programs."""
    message = result.error.message if result.error else None
    found: object = result.capacity.model_dump(mode="json") if result.capacity else None
    method, outcome = result.experiment.method, result.outcome
    told = {"method": method, "outcome": outcome, "message": message, "capacity": found}
    parallel = result.experiment.parallel
    return told if parallel is None else {**told, "parallel": parallel.model_dump()}


def tabulate(results: Sequence[Result]) -> str:
    """Lay out what was found, for people."""
    names = [_name(result.experiment) for result in results]
    width = max(map(len, names))
    lines = [f"{'method':{width}}  largest batch  predicted peak  safe batch"]
    for method, result in zip(names, results, strict=True):
        capacity = result.capacity
        if capacity is None:
            why = result.error.message if result.error else "no reason is known"
            lines.append(f"{method:{width}}  {result.outcome}: {why}")
            continue
        largest = f"{capacity.batch_size:,}" + ("+" if capacity.limited_by == "search" else "")
        safe = "none" if capacity.safe_batch_size is None else f"{capacity.safe_batch_size:,}"
        peak = f"{capacity.peak_bytes / _MIB:,.0f} MiB"
        lines.append(f"{method:{width}}  {largest:>13}  {peak:>14}  {safe:>10}")
    found = [result.capacity for result in results if result.capacity]
    budgets = {capacity.budget_bytes for capacity in found}
    lines += [f"memory: {budget / _MIB:,.0f} MiB" for budget in budgets]
    if any(capacity.safe_share for capacity in found):
        lines.append("safe: a tenth of the memory is left")
    if any(capacity.safe_share is None for capacity in found):
        lines.append("safe: the allocator never has to release its cache to find room")
    if any(result.experiment.parallel for result in results):
        lines.append("batches and peaks are those of each rank")
    for name, result in zip(names, results, strict=True):
        lines += [f"{name}: {caveat}" for caveat in _caveats(result.capacity)]
    return "\n".join(lines + tell_smallest(results))


def _name(experiment: Experiment) -> str:
    ranks = experiment.parallel
    return experiment.method if ranks is None else f"{experiment.method}, {ranks.text}"


def _caveats(capacity: Capacity | None) -> list[str]:
    """Say what else to know of a largest batch."""
    if capacity is None:
        return []
    smallest = say_smallest_batch(capacity.smallest_batch_size)
    caveats = [] if smallest is None else [smallest]
    if capacity.limited_by != "fragmentation":
        return caveats
    by_size, expandable = capacity.unfragmented_batch_size, capacity.expandable_batch_size
    fragmentation = (
        f"free memory is in pieces too small for {capacity.batch_size + 1:,} samples; by size "
        f"{by_size:,} fit, with PYTORCH_ALLOC_CONF=expandable_segments:True {expandable or 0:,}"
    )
    return [*caveats, fragmentation]


def judge(_: Sequence[Experiment], results: Sequence[Result]) -> tuple[str, str, bool]:
    """Return the largest batch of each method."""
    text = json.dumps([describe(result) for result in results], indent=1)
    return text, tabulate(results), any(result.capacity for result in results)


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    answer(make_parser("capacity", __doc__).parse_args(argv), judge)
