"""How large a batch of one method fits."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from dpprof.ask.answer import DataFrame, tabulate
from dpprof.ask.capacities import find_capacities, list_experiments
from dpprof.ask.estimate import Predicted
from dpprof.ask.predictions import PredictionError
from dpprof.ask.questions import naming
from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.validation import refuse, spell
from dpprof.experiments.records.result import Result
from dpprof.results.analysis.advice.advice import describe

_SAFE = {
    False: "the allocator never has to release its cache to find room",
    True: "a tenth of the memory is left",
}
"""What a safe batch is, by whether a share of the memory is left."""


class Fitting(Predicted):
    """The capacity of a method; ``str`` tells of its largest safe batch, as ``plot`` shows it."""

    _short: ClassVar = ("batch_size", "peak_bytes", "fits")

    def __init__(self, result: Result) -> None:
        super().__init__(result)
        assert result.capacity is not None
        self.capacity = result.capacity

    @property
    def sentence(self) -> str:
        """The largest batch and the largest safe one."""
        option, experiment = describe(self.result), self.result.experiment
        safe = "none" if option.safe_batch_size is None else f"{option.safe_batch_size:,}"
        return (
            f"{experiment.method} on {experiment.model_name}: a batch of "
            f"{self.capacity.batch_size:,} fits, and the largest safe one is {safe}."
        )

    def __str__(self) -> str:
        return "\n".join([self.sentence, *explain_batches([self.result])])

    def table(self) -> DataFrame:
        """Return the batches that were tried, with their peaks."""
        tried = sorted(self.capacity.estimates.items())
        frame = tabulate(tried, ("batch_size", "peak_bytes"))
        return frame.assign(fits=frame["batch_size"] <= self.capacity.batch_size)


def capacity(
    model: str | dict[str, Any] | Callable[[Experiment], Any],
    method: str,
    *,
    again: bool = False,
    **experiment: Any,
) -> Fitting:
    """Find the largest batch that fits with one method, and the largest safe one.

    Args:
        model: The model, as ``estimate`` takes it.
        method: How the gradient is computed.
        again: Whether to ignore what is kept, in results and the package.
        **experiment: Options of ``estimate`` but ``batch_size``; ``target`` is required.

    Raises:
        InputError: A value is not allowed, or a required one is missing.
        PredictionError: No batch fits, or nothing could be predicted.

    Example:
        >>> import dpprof
        >>> room = {"target": "l4", "memory_limit_bytes": "100MiB"}
        >>> dpprof.capacity("tiny", "flash-bk", seq_len=64, **room).capacity.batch_size
        65
    """
    with naming({"model": model, **experiment}) as fields:
        asked = list_experiments(fields, [method])
        if len(asked) > 1:
            raise refuse(spell("method"), method, "one capacity has no lists; advise takes them")
        [result] = find_capacities(asked, Path(), again=again)
    if result.capacity is None:
        raise PredictionError(result)
    return Fitting(result)


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
