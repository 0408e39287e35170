"""Instrument ``capacity``: the largest batch that fits into memory, by estimates.

The bytes of each instant of a step grow linearly with the batch, so the peak is a convex function
of it. A line through two batches that fit may give too large a batch, and a line between one that
fits and one that does not may give too small a batch. So a few estimates are enough. A batch counts
as fitting only if its own estimate fits.

On CUDA a batch fits if the simulated caching allocator finds room for every request: its segments
can strand gigabytes that are free.

A batch is safe if the allocator never has to release its cache for it. On a CPU, and for a method
that takes one sample at a time, a batch is safe if it leaves a tenth of the memory.
"""

from collections.abc import Callable
from typing import Any

import psutil

from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.records.result import Capacity, Measurement
from dpprof.predict.estimate import Traces
from dpprof.predict.memory.allocator_replay import Placement
from dpprof.predict.memory.caching_allocator import OutOfMemoryError
from dpprof.predict.tracing import find_target, state_estimate
from dpprof.private.errors import UnsupportedError
from dpprof.subjects.methods.training_step import Enter, TrainingStep
from dpprof.subjects.setup import import_method

MOST = 65_536  # no larger batch is tried

GROWTH = 16
"""The next batch is at most this many times the largest that fits, because the peaks of few samples
may be equal."""

FURTHER = 10
"""How many samples more than the smallest batch the first one that is tried has: very few
samples may take other code paths. Most methods then begin with eleven, which divides few sizes
by chance."""

SAFE_SHARE = 0.9  # the share of the memory for a safe batch, where the allocator is not simulated


def search(
    peak: Callable[[int], int],
    budget: int,
    peaks: dict[int, int],
    *,
    least: int = 1,
    most: int = MOST,
) -> int | None:
    """Find the largest batch whose peak is within a budget; None if not even the smallest fits.

    ``peak`` predicts the peak of a batch size in bytes, and is called as rarely as possible;
    ``peaks`` has those that are known, and gets the new ones.
    """

    def fits(batch: int) -> bool:
        if batch not in peaks:
            peaks[batch] = peak(batch)
        return peaks[batch] <= budget

    if not any(size <= budget for size in peaks.values()) and not fits(least):
        return None
    low = max(batch for batch, size in peaks.items() if size <= budget)
    beyond = [batch for batch, size in peaks.items() if size > budget]
    high = min(beyond, default=most + 1)
    before = high - low
    use_line = True
    while high - low > 1:
        # If the line did not halve the range, halve it, unless one batch is left.
        by_line = max(min(_interpolate(peaks, low, high, budget), GROWTH * low), low + 1)
        batch = min(by_line, high - 1) if use_line or by_line == low + 1 else (low + high) // 2
        if fits(batch):
            low = batch
        else:
            high = batch
        use_line = high not in peaks or not use_line or 2 * (high - low) <= before
        before = high - low
    return low


def _interpolate(peaks: dict[int, int], low: int, high: int, budget: int) -> int:
    """Return the batch at which a line through two known batches reaches the budget."""
    others = [batch for batch in peaks if batch != low]
    if not others:
        return low + 1
    other = high if high in peaks else max(others)
    slope = (peaks[other] - peaks[low]) / (other - low)
    return high - 1 if slope <= 0 else low + int((budget - peaks[low]) / slope)


def back_off(
    holds: Callable[[int], bool],
    most: int,
    guess: Callable[[], int] | None = None,
    *,
    least: int = 1,
) -> int | None:
    """Find a batch for which something holds and for the next one does not; None for none.

    ``holds`` is called as rarely as possible, and mostly holds for a batch if it does for a larger
    one. Where it does not hold for ``most``, ``guess`` says where to look, else in the middle.
    """
    if holds(most):
        return most
    low, high, step = least - 1, most, 1
    batch = guess() if guess else (low + high) // 2
    while high - low > 1:
        batch = min(max(batch, low + 1), high - 1)
        # Steps away from the guess grow until the answer changes; then what is left is halved.
        if holds(batch):
            low, batch = batch, batch + step
        else:
            high, batch = batch, batch - step
        step *= 2
        if low >= least and high < most:
            batch = (low + high) // 2
    return low if low >= least else None


def measure(experiment: Experiment, enter: Enter) -> Measurement:
    """Find the largest batch of one experiment's model, method and sequence length.

    The experiment's batch size is ignored.

    Raises:
        MemoryError: Not even the method's smallest batch fits.
        UnsupportedError: The device is a GPU without a known target, or the method's smallest batch
            is larger than the largest that is tried.
    """
    method = import_method(experiment)
    target = find_target(experiment)
    here = psutil.virtual_memory().total // experiment.world_size  # ranks share it
    budget = int(experiment.memory_limit_bytes or (target.memory_bytes if target else here))
    least = method.smallest_batch_size(experiment)
    if least > MOST:
        raise UnsupportedError(
            f"{experiment.method} takes batches of at least {least:,} samples, and none of more "
            f"than {MOST:,} is tried"
        )
    traces = Traces(experiment, enter, describing=False)
    capacity = _find(method, batches := _Batches(experiment, traces, budget, least))
    if capacity is None:
        parameters_bytes = traces.facts(least).model.parameters_bytes // experiment.shards
        raise MemoryError(_explain(experiment, batches, parameters_bytes))
    if not traces.confirms(capacity.stated_batch_size):
        traces.stop_interpolating()
        capacity = _find(method, _Batches(experiment, traces, budget, least))
        assert capacity is not None
    stated_as = experiment.model_copy(update={"batch_size": capacity.stated_batch_size})
    if target is None:  # its times rest on descriptions of calls
        traces = Traces(experiment, enter)
    measurement = state_estimate(traces.trace(capacity.stated_batch_size), stated_as)
    return measurement.model_copy(update={"capacity": capacity})


def _find(method: type[TrainingStep], batches: "_Batches") -> Capacity | None:
    if method.one_at_a_time:
        return _extrapolate(batches)
    if batches.on_cuda:
        return _search_by_placement(batches)
    largest, safe = batches.find_largest(1, SAFE_SHARE)
    return None if largest is None else batches.state(largest, safe, batches.peaks.__getitem__)


class _Batches:
    """One experiment with many batch sizes."""

    def __init__(self, experiment: Experiment, traces: Traces, budget: int, least: int) -> None:
        self.budget = budget
        self.least = least
        self.peaks: dict[int, int] = {}
        """Peaks of timelines by batch size."""

        self.on_cuda = find_target(experiment) is not None
        self._traces = traces
        self._placed: dict[tuple[int, bool, bool], Placement | None] = {}

    def find_largest(self, *shares: float) -> list[int | None]:
        """Find the largest batch whose peak is within each share of the budget; None for none."""
        more = self.least + FURTHER
        if more <= MOST and not self._traces.rule_out(self.least, more, self.budget):
            guess = min(self._traces.frame(more, self.budget), MOST)
            self._peak(more)
            if guess > self.least:
                self._peak(guess)
        budgets = (int(share * self.budget) for share in shares)
        return [search(self._peak, budget, self.peaks, least=self.least) for budget in budgets]

    def _peak(self, batch_size: int) -> int:
        if batch_size not in self.peaks:
            self.peaks[batch_size] = self._traces.footprint(batch_size).peak_bytes
        return self.peaks[batch_size]

    def place(self, batch_size: int) -> Placement:
        """Place a training with this batch size without a limit."""
        placed = self.place_within(batch_size, limited=self.is_safe(batch_size))
        assert placed is not None
        return placed

    def place_within(
        self, batch_size: int, *, expandable: bool = False, limited: bool = True
    ) -> Placement | None:
        """Place a training with this batch size within the budget; None if it does not fit."""
        key = batch_size, limited, expandable
        if key not in self._placed:
            footprint = self._traces.footprint(batch_size)
            try:
                limit = self.budget if limited else None
                self._placed[key] = footprint.place(limit, expandable=expandable)
            except OutOfMemoryError:
                self._placed[key] = None
        return self._placed[key]

    def is_safe(self, batch_size: int) -> bool:
        """Return whether the allocator never has to release its cache, if it has the budget."""
        placed = self.place_within(batch_size)
        return placed is not None and not placed.retries

    def back_off_from(self, batch_size: int, fits: Callable[[int], bool]) -> int | None:
        """Find a batch that fits, and the next larger one does not; at most ``batch_size``.

        The search begins at the batch that fits if the allocator reserves equally much for each
        sample.
        """

        def guess() -> int:
            return batch_size * self.budget // self.place(batch_size).peaks.reserved_bytes

        return back_off(fits, batch_size, guess, least=self.least)

    def measure_need(self, batch_size: int) -> tuple[int, int | None]:
        """Return the peak of a batch, and what the allocator would reserve for it on CUDA."""
        if not self.on_cuda:
            return self._peak(batch_size), None
        peaks = self.place(batch_size).peaks
        return peaks.allocated_bytes, peaks.reserved_bytes

    def state(
        self, largest: int, safe: int | None, peak: Callable[[int], int], **others: Any
    ) -> Capacity:
        """State the largest and the safe batch; ``peak`` returns the peak of each."""
        fields: dict[str, Any] = {
            "next_peak_bytes": self.peaks.get(largest + 1),
            "limited_by": "memory" if largest < MOST else "search",
            "extrapolated": False,
            "safe_share": SAFE_SHARE,
            "stated_batch_size": safe or largest,
            "estimates": dict(sorted(self.peaks.items())),
        }
        return Capacity(
            budget_bytes=self.budget,
            batch_size=largest,
            peak_bytes=peak(largest),
            safe_batch_size=safe,
            safe_peak_bytes=None if safe is None else peak(safe),
            smallest_batch_size=self.least,
            **fields | others,
        )


def _search_by_placement(batches: _Batches) -> Capacity | None:
    """Search on CUDA: a batch fits if the caching allocator finds room for every request."""
    [by_size] = batches.find_largest(1)
    if by_size is None:
        return None

    largest = batches.back_off_from(
        by_size, lambda batch_size: batches.place_within(batch_size) is not None
    )
    if largest is None:
        return None
    placed = batches.place_within(largest)
    assert placed is not None
    safe = batches.back_off_from(largest, batches.is_safe)
    expandable = back_off(
        lambda batch_size: batches.place_within(batch_size, expandable=True) is not None,
        by_size,
        lambda: by_size - 1,
        least=batches.least,
    )
    return batches.state(
        largest,
        safe,
        lambda batch_size: batches.place(batch_size).peaks.allocated_bytes,
        **({"limited_by": "fragmentation"} if largest < by_size else {}),
        reserved_bytes=batches.place(largest).peaks.reserved_bytes,
        retries=placed.retries_in_last_step,
        unfragmented_batch_size=by_size,
        expandable_batch_size=expandable,
        safe_share=None,
    )


def _extrapolate(batches: _Batches) -> Capacity | None:
    """Search along a line through the smallest batches of a method that takes one at a time.

    On CUDA the line is that of the bytes that the allocator would reserve. They grow in steps, so
    beyond the traced batches they are taken to grow at least as much as the peak.
    """
    peak, reserved = batches.measure_need(batches.least)
    if (reserved or peak) > batches.budget:
        return None
    last = batches.least + 2
    few = {size: batches.measure_need(size) for size in range(batches.least, last + 1)}
    peaks = _extend({size: peak for size, (peak, _) in few.items()})
    line = _extend({size: reserved or peak for size, (peak, reserved) in few.items()})

    def needs(size: int) -> int:
        return max(line(size), line(min(size, last)) + peaks(size) - peaks(min(size, last)))

    searched: dict[int, int] = {}
    largest = search(needs, batches.budget, searched, least=batches.least)
    if largest is None:
        return None
    safe = search(needs, int(SAFE_SHARE * batches.budget), searched, least=batches.least)
    return batches.state(
        largest,
        safe,
        peaks,
        reserved_bytes=needs(largest) if batches.on_cuda else None,
        next_peak_bytes=peaks(largest + 1) if largest + 1 in searched else None,
        extrapolated=True,
        stated_batch_size=min(batches.least + 1, largest),
        estimates={size: peaks(size) for size in sorted(searched)},
    )


def _extend(few: dict[int, int]) -> Callable[[int], int]:
    """Return the line through the two largest of a few batches, as a function of the batch size."""
    last = max(few)
    return lambda size: few.get(size) or few[last] + (size - last) * (few[last] - few[last - 1])


def _explain(experiment: Experiment, batches: _Batches, parameters_bytes: int) -> str:
    least, budget = batches.least, batches.budget
    need = batches.peaks.get(least, 0)
    if need <= budget:  # then it is what would be reserved that is too much
        peak, reserved = batches.measure_need(least)
        need = reserved or peak
    needed, there = (f"{size / 2**20:,.0f} MiB" for size in (need, budget))
    samples = "one sample" if least == 1 else f"its smallest batch, {least:,} samples"
    return (
        f"{experiment.model_name} with {experiment.method} needs {needed} for {samples} of "
        f"{experiment.seq_len:,} tokens, and there are {there}"
        + (
            f"; its parameters alone take {parameters_bytes / 2**20:,.0f} MiB: store them in 16 "
            "bits (parameters_dtype), or take a larger card or several (parallel)"
            if parameters_bytes > budget
            else ""
        )
    )
