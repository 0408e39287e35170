"""What a capacity says of its batches, as text."""

from collections import defaultdict
from collections.abc import Sequence

from dpprof.experiments.records.result import Result

_SAFE = {
    False: "the allocator never has to release its cache to find room",
    True: "a tenth of the memory is left",
}
"""What a safe batch is, by whether a share of the memory is left."""


def explain_batches(results: Sequence[Result]) -> list[str]:
    """Return the lines of ``explain_safety``, and where pieces of free memory bound a batch."""
    lines = explain_safety(results)
    for result in results:
        experiment, capacity = result.experiment, result.capacity
        if capacity is not None and capacity.limited_by == "fragmentation":
            ranks = "" if experiment.parallel is None else f", {experiment.parallel.text}"
            whole = "" if experiment.lora is None else " with LoRA"
            lines.append(
                f"{experiment.method}{whole}{ranks}: free memory is in pieces too small for "
                f"{capacity.batch_size + 1:,} samples; by size "
                f"{capacity.unfragmented_batch_size:,} fit, with "
                "PYTORCH_ALLOC_CONF=expandable_segments:True "
                f"{capacity.expandable_batch_size or 0:,}"
            )
    return lines


def explain_safety(results: Sequence[Result]) -> list[str]:
    """Say what a safe batch is, and for which methods it is something else."""
    methods: dict[str, dict[str, None]] = defaultdict(dict)
    for result in results:
        if result.capacity is not None:
            meaning = _SAFE[result.capacity.safe_share is not None]
            methods[meaning][result.experiment.method] = None
    meanings = sorted(methods, key=lambda meaning: len(methods[meaning]), reverse=True)
    others = [f"; for {', '.join(methods[meaning])}: {meaning}" for meaning in meanings[1:]]
    return [f"Safe: {meanings[0]}{''.join(others)}."] if meanings else []
