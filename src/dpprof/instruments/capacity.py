"""Instrument ``capacity``: the largest batch that fits into memory, by estimates.

The bytes of each instant of a step grow linearly with the batch, so the peak is a convex function
of it. A line through two batches that fit may give too large a batch, and a line between one that
fits and one that does not may give too small a batch. So a few estimates are enough. A batch counts
as fitting only if its own estimate fits.

On CUDA a batch fits if the simulated caching allocator finds room for every request: its segments
can strand gigabytes that are free.
"""

from collections.abc import Callable

import psutil

from dpprof.devices.cpu import Cpu
from dpprof.instruments.memory import (
    TimelineRecorder,
    Traced,
    find_target,
    state_estimate,
    trace_steps,
    tracing,
)
from dpprof.instruments.setup import import_method, make_batch, set_up
from dpprof.memory.allocator_replay import Placement, place
from dpprof.memory.caching_allocator import DEFAULT, EXPANDABLE, OutOfMemoryError, Settings
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
"""The share of the memory for a safe batch, where the allocator is not simulated."""

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


def back_off(holds: Callable[[int], bool], most: int) -> int | None:
    """Find a batch for which something holds and for the next one does not.

    Args:
        holds: Called as rarely as possible; mostly holds for a batch if it does for a larger one.
        most: The largest batch to try.

    Returns:
        The batch; None if it does not even hold for one sample.
    """
    if holds(most):
        return most
    high, step = most, max(1, most // 8)
    while not holds(low := max(high - step, 1)):
        if low == 1:
            return None
        high, step = low, 2 * step
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low


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
    batches = _Batches(experiment, enter, target, budget)
    if method.one_at_a_time:
        capacity = _extrapolate(batches, on_cuda=target is not None)
    else:
        capacity = _search_by_size(batches) if target is None else _search_by_placement(batches)
    if capacity is None:
        raise MemoryError(_explain(experiment, batches.need_one(), budget))
    stated_as = experiment.model_copy(update={"batch_size": capacity.stated_batch_size})
    measurement = state_estimate(batches.trace(capacity.stated_batch_size), stated_as)
    return measurement.model_copy(update={"capacity": capacity})


class _Batches:
    """One experiment with many batch sizes.

    Peaks come from one training that takes every batch size in turn, which is fast. Where the
    allocator would place it depends on the first step, so that takes a training for each.
    """

    def __init__(
        self, experiment: Experiment, enter: Enter, target: Target | None, budget: int
    ) -> None:
        self.budget = budget
        self.peaks: dict[int, int] = {}
        """Peaks of timelines by batch size."""

        self._experiment = experiment
        self._enter = enter
        self._target = target
        self._reserved: dict[int, int] = {}
        self._traced: dict[int, Traced] = {}

    def find_largest(self, share: float = 1) -> int | None:
        """Find the largest batch whose peak is within a share of the budget; None for none."""
        method = import_method(self._experiment)
        with tracing(self._target) as recorder:
            training = set_up(self._experiment, method, Cpu(), lambda *_: None)
            timeline_recorder = TimelineRecorder(recorder, training.step, self._enter)

            def run(batch_size: int) -> int:
                nonlocal training  # frees the last batch before the next step begins
                module, seq_len = training.step.module, self._experiment.seq_len
                training = training._replace(batch=make_batch(module, Cpu(), batch_size, seq_len))
                step = timeline_recorder.run(training.batch)
                # Ghost clipping keeps the last batch's norms until the next step, so the first step
                # with another batch size is not steady.
                return (
                    step if step.is_steady else timeline_recorder.run(training.batch)
                ).peak_bytes

            timeline_recorder.run(training.batch)
            return search(run, int(share * self.budget), self.peaks)

    def trace(self, batch_size: int) -> Traced:
        """Trace a training with this batch size."""
        if batch_size not in self._traced:
            experiment = self._experiment.model_copy(update={"batch_size": batch_size})
            self._traced[batch_size] = trace_steps(experiment, self._enter)
        return self._traced[batch_size]

    def place(self, batch_size: int, *, limited: bool, settings: Settings = DEFAULT) -> Placement:
        """Place a training with this batch size, within the budget or without a limit."""
        step = self.trace(batch_size).steady
        limit = self.budget if limited else None
        return place(step.before, step.events, step.requested_bytes, limit, settings=settings)

    def reserved(self, batch_size: int) -> int:
        """Return what the allocator would reserve without a limit."""
        if batch_size not in self._reserved:
            self._reserved[batch_size] = self.place(batch_size, limited=False).peaks.reserved_bytes
        return self._reserved[batch_size]

    def need_one(self) -> int:
        """Return what one sample needs: its peak, or what the allocator would reserve for it."""
        return self.peaks[1] if self._target is None else self.reserved(1)

    def find_retries(self, batch_size: int, settings: Settings = DEFAULT) -> int | None:
        """Return how often a step releases the cache; None if it runs out of memory."""
        try:
            return self.place(batch_size, limited=True, settings=settings).retries_in_last_step
        except OutOfMemoryError:
            return None


def _search_by_size(batches: _Batches) -> Capacity | None:
    """Search on a CPU, whose allocator has no pool."""
    largest, safe = (batches.find_largest(share) for share in (1, SAFE_SHARE))
    if largest is None:
        return None
    return Capacity(
        budget_bytes=batches.budget,
        batch_size=largest,
        peak_bytes=batches.peaks[largest],
        next_peak_bytes=batches.peaks.get(largest + 1),
        limited_by="memory" if largest < MOST else "search",
        extrapolated=False,
        safe_share=SAFE_SHARE,
        safe_batch_size=safe,
        safe_peak_bytes=None if safe is None else batches.peaks[safe],
        stated_batch_size=safe or largest,
        estimates=dict(sorted(batches.peaks.items())),
    )


def _search_by_placement(batches: _Batches) -> Capacity | None:
    """Search on CUDA: a batch fits if the caching allocator finds room for every request."""
    by_size = batches.find_largest()
    if by_size is None:
        return None

    def fits(batch_size: int, settings: Settings = DEFAULT) -> bool:
        return batches.find_retries(batch_size, settings) is not None

    largest = back_off(fits, by_size)
    if largest is None:
        return None
    safe = back_off(lambda batch_size: batches.reserved(batch_size) <= batches.budget, largest)
    expandable = back_off(lambda batch_size: fits(batch_size, EXPANDABLE), by_size)
    limited_by = "memory" if largest == by_size else "fragmentation"
    return Capacity(
        budget_bytes=batches.budget,
        batch_size=largest,
        peak_bytes=batches.place(largest, limited=False).peaks.allocated_bytes,
        reserved_bytes=batches.reserved(largest),
        retries=batches.find_retries(largest),
        next_peak_bytes=batches.peaks.get(largest + 1),
        limited_by="search" if largest == MOST else limited_by,
        unfragmented_batch_size=by_size,
        expandable_batch_size=expandable,
        extrapolated=False,
        safe_share=None,
        safe_batch_size=safe,
        safe_peak_bytes=None
        if safe is None
        else batches.place(safe, limited=False).peaks.allocated_bytes,
        stated_batch_size=safe or largest,
        estimates=dict(sorted(batches.peaks.items())),
    )


def _extrapolate(batches: _Batches, *, on_cuda: bool) -> Capacity | None:
    """Search along the line through two and three samples of a method that takes one at a time."""
    few = {
        size: batches.reserved(size) if on_cuda else batches.trace(size).steady.peak_bytes
        for size in (1, 2, 3)
    }

    def extend(batch_size: int) -> int:
        return few.get(batch_size) or few[2] + (batch_size - 2) * (few[3] - few[2])

    known: dict[int, int] = {}
    largest = search(extend, batches.budget, known)
    if largest is None:
        return None
    safe = search(extend, int(SAFE_SHARE * batches.budget), known)
    return Capacity(
        budget_bytes=batches.budget,
        batch_size=largest,
        peak_bytes=known[largest],
        reserved_bytes=known[largest] if on_cuda else None,
        next_peak_bytes=known.get(largest + 1),
        limited_by="memory" if largest < MOST else "search",
        extrapolated=True,
        safe_share=SAFE_SHARE,
        safe_batch_size=safe,
        safe_peak_bytes=None if safe is None else known[safe],
        stated_batch_size=min(2, largest),
        estimates=dict(sorted(known.items())),
    )


def _find_budget(experiment: Experiment, target: Target | None) -> int:
    """Return the experiment's limit, else the target's memory, else this machine's."""
    if experiment.memory_limit_bytes is not None:
        return int(experiment.memory_limit_bytes)
    return psutil.virtual_memory().total if target is None else int(target.memory_bytes)


def _explain(experiment: Experiment, needed: int, budget: int) -> str:
    return (
        f"{experiment.model_name} with {experiment.method} needs {needed / 2**20:,.0f} MiB for "
        f"one sample of {experiment.seq_len:,} tokens, and there are {budget / 2**20:,.0f} MiB"
    )
