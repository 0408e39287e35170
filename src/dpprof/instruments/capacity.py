"""Instrument ``capacity``: the largest batch that fits into memory, by estimates.

The bytes of each instant of a step grow linearly with the batch, so the peak is a convex function
of it. A line through two batches that fit may give too large a batch, and a line between one that
fits and one that does not may give too small a batch. So a few estimates are enough. A batch counts
as fitting only if its own estimate fits.
"""

from collections.abc import Callable

import psutil

from dpprof.devices.cpu import Cpu
from dpprof.instruments.memory import TimelineRecorder, find_target, state, tracing
from dpprof.instruments.setup import import_method, make_batch, set_up
from dpprof.memory.summary import state_memory
from dpprof.memory.timeline import MemoryTimeline
from dpprof.methods.training_step import Enter
from dpprof.records.result import Capacity, Measurement
from dpprof.spec.experiment import Experiment
from dpprof.spec.target import Target

MOST = 65_536
"""No larger batch is tried."""

GROWTH = 16
"""The next batch is at most this many times the largest that fits, because the peaks of few samples
may be equal."""

SAFE_SHARE = 0.9
"""The share for a safe batch: an allocator reserves more than it allocates."""

Peak = Callable[[int], int]
"""From a batch size to the predicted peak."""


def search(peak: Peak, budget: int, known: dict[int, int], most: int = MOST) -> int | None:
    """Find the largest batch whose peak is within a budget.

    Args:
        peak: Predicts a peak; called as rarely as possible.
        budget: Bytes.
        known: Peaks by batch that are known already; new ones are added.
        most: The largest batch to try.

    Returns:
        The batch; None if not even one sample fits.
    """

    def fits(batch: int) -> bool:
        if batch not in known:
            known[batch] = peak(batch)
        return known[batch] <= budget

    if not fits(1):
        return None
    low = max(batch for batch, size in known.items() if size <= budget)
    beyond = [batch for batch, size in known.items() if size > budget]
    high = min(beyond, default=most + 1)
    before = high - low
    use_line = True
    while high - low > 1:
        # If the line did not halve the range, halve it, unless one batch is left.
        by_line = max(min(_interpolate(known, low, high, budget), GROWTH * low), low + 1)
        batch = min(by_line, high - 1) if use_line or by_line == low + 1 else (low + high) // 2
        if fits(batch):
            low = batch
        else:
            high = batch
        use_line = high not in known or not use_line or 2 * (high - low) <= before
        before = high - low
    return low


def _interpolate(known: dict[int, int], low: int, high: int, budget: int) -> int:
    """Return the batch at which a line through two known batches reaches the budget."""
    others = [batch for batch in known if batch != low]
    if not others:
        return low + 1
    other = high if high in known else max(others)
    slope = (known[other] - known[low]) / (other - low)
    return high - 1 if slope <= 0 else low + int((budget - known[low]) / slope)


def measure(experiment: Experiment, enter: Enter) -> Measurement:
    """Find the largest batch of one experiment's model, method and sequence length.

    One training is used for all estimates.

    Args:
        experiment: The experiment; its batch size is ignored.
        enter: Called as each phase begins.

    Raises:
        MemoryError: Not even one sample fits.
        UnsupportedError: The device is a GPU without a known target.
    """
    method = import_method(experiment)
    target = find_target(experiment)
    budget = _find_budget(experiment, target)
    device = Cpu()
    known: dict[int, int] = {}
    with tracing(target) as recorder:
        training = set_up(experiment, method, device, lambda *_: None)
        timeline_recorder = TimelineRecorder(recorder, training.step, enter)

        def run(batch_size: int, *, counting: bool = False) -> MemoryTimeline:
            nonlocal training  # frees the last batch before the next step begins
            batch = make_batch(training.step.module, device, batch_size, experiment.seq_len)
            training = training._replace(batch=batch)
            step = timeline_recorder.run(batch, counting=counting)
            # Ghost clipping keeps the last batch's norms until the next step, so the first step
            # with another batch size is not steady.
            return step if step.is_steady else timeline_recorder.run(batch, counting=counting)

        def peak(batch_size: int) -> int:
            return run(batch_size).peak_bytes

        first = timeline_recorder.run(training.batch)
        predict = _extend(peak) if method.one_at_a_time else peak
        largest = search(predict, budget, known)
        if largest is None:
            raise MemoryError(_explain(experiment, known[1], budget))
        safe = search(predict, int(SAFE_SHARE * budget), known)
        stated = min(2, largest) if method.one_at_a_time else safe or largest
        steady = run(stated, counting=True)
    capacity = Capacity(
        budget_bytes=budget,
        batch_size=largest,
        peak_bytes=known[largest],
        next_peak_bytes=known.get(largest + 1),
        limited_by="memory" if largest < MOST else "search",
        extrapolated=method.one_at_a_time,
        safe_share=SAFE_SHARE,
        safe_batch_size=safe,
        safe_peak_bytes=None if safe is None else known[safe],
        stated_batch_size=stated,
        estimates=dict(sorted(known.items())),
    )
    stated_as = experiment.model_copy(update={"batch_size": stated})
    memory = state_memory(stated_as, first, steady, None, real=False)
    measurement = state(
        stated_as, training, timeline_recorder.paths, steady, memory=memory, ceilings=target
    )
    return measurement.model_copy(update={"capacity": capacity})


def _find_budget(experiment: Experiment, target: Target | None) -> int:
    """Return the experiment's limit, else the target's memory, else this machine's."""
    if experiment.memory_limit_bytes is not None:
        return int(experiment.memory_limit_bytes)
    return psutil.virtual_memory().total if target is None else int(target.memory_bytes)


def _extend(peak: Peak) -> Peak:
    """Extrapolate the line through two and three samples."""
    few = {batch: peak(batch) for batch in (1, 2, 3)}
    return lambda batch: few.get(batch) or few[2] + (batch - 2) * (few[3] - few[2])


def _explain(experiment: Experiment, needed: int, budget: int) -> str:
    return (
        f"{experiment.model_name} with {experiment.method} needs {needed / 2**20:,.0f} MiB for "
        f"one sample of {experiment.seq_len:,} tokens, and there are {budget / 2**20:,.0f} MiB"
    )
