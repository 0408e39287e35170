"""Say how large a batch fits on a GPU that need not be here, for every method."""

import json
from collections.abc import Sequence

from dpprof.cli.capacities import answer, make_parser
from dpprof.records.result import Capacity, Result
from dpprof.spec.experiment import Experiment

_MIB = 2**20


def describe(result: Result) -> dict[str, object]:
    """Spell what was found for a method, for programs."""
    message = result.error.message if result.error else None
    found = result.capacity.model_dump(mode="json") if result.capacity else None
    method, outcome = result.experiment.method, result.outcome
    return {"method": method, "outcome": outcome, "message": message, "capacity": found}


def tabulate(results: Sequence[Result]) -> str:
    """Lay out what was found, for people."""
    width = max(len(result.experiment.method) for result in results)
    lines = [f"{'method':{width}}  largest batch  predicted peak  safe batch"]
    for result in results:
        capacity, method = result.capacity, result.experiment.method
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
    lines += [
        f"{result.experiment.method}: {_explain_fragmentation(result.capacity)}"
        for result in results
        if result.capacity and result.capacity.limited_by == "fragmentation"
    ]
    return "\n".join(lines)


def _explain_fragmentation(capacity: Capacity) -> str:
    by_size, expandable = capacity.unfragmented_batch_size, capacity.expandable_batch_size
    return (
        f"free memory is in pieces too small for {capacity.batch_size + 1:,} samples; by size "
        f"{by_size:,} fit, with PYTORCH_ALLOC_CONF=expandable_segments:True {expandable or 0:,}"
    )


def judge(_: Sequence[Experiment], results: Sequence[Result]) -> tuple[str, str, bool]:
    """Return the largest batch of each method."""
    text = json.dumps([describe(result) for result in results], indent=1)
    return text, tabulate(results), any(result.capacity for result in results)


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    answer(make_parser("capacity", __doc__).parse_args(argv), judge)
