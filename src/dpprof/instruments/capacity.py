"""Instrument ``capacity``: the largest batch that fits a memory, by estimates.

The peak of a step is the highest of many instants, and the bytes of each grow in
proportion to the batch: as a function of the batch it bends upwards only. So a straight
line through two batches that fit aims too high at worst, one between a batch that fits and
one that does not aims too low at worst, and a handful of estimates close in on the answer.
Whatever the line says, a batch counts as fitting only if it was estimated to.
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
"""So much larger than the largest that fits is a batch at most that is tried next: where few
samples change no peak, a straight line through them aims anywhere."""

SAFE_SHARE = 0.9
"""An allocator reserves more than it allocates, and no prediction is exact."""

Peak = Callable[[int], int]
"""From a batch size to the predicted peak."""


def search(peak: Peak, budget: int, known: dict[int, int], most: int = MOST) -> int | None:
    """Find the largest batch whose peak is within a budget.

    Args:
        peak: Predicts; asked as rarely as possible.
        budget: Bytes.
        known: Peaks by batch that are known already; grows.
        most: The largest batch to try.

    Returns:
        The batch; None where not even one sample fits.
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
    aim = True
    while high - low > 1:
        # Where aiming did not halve what is left, halving does, unless it is the end.
        aimed = max(min(_aim(known, low, high, budget), GROWTH * low), low + 1)
        batch = min(aimed, high - 1) if aim or aimed == low + 1 else (low + high) // 2
        if fits(batch):
            low = batch
        else:
            high = batch
        aim = high not in known or not aim or 2 * (high - low) <= before
        before = high - low
    return low


def _aim(known: dict[int, int], low: int, high: int, budget: int) -> int:
    """Say where a straight line through two known batches meets the budget."""
    others = [batch for batch in known if batch != low]
    if not others:
        return low + 1
    other = high if high in known else max(others)
    slope = (known[other] - known[low]) / (other - low)
    return high - 1 if slope <= 0 else low + int((budget - known[low]) / slope)


def measure(experiment: Experiment, enter: Enter) -> Measurement:
    """Find the largest batch of one experiment's model, method and sequence length.

    The experiment's own batch size does not matter. One training serves all estimates.

    Args:
        experiment: What to find the largest batch of.
        enter: Called as each phase begins.

    Raises:
        MemoryError: Not even one sample fits.
        UnsupportedError: The device is a GPU that no target is known for.
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
            nonlocal training  # so that the last batch is gone when the next step begins
            batch = make_batch(training.step.module, device, batch_size, experiment.seq_len)
            training = training._replace(batch=batch)
            step = timeline_recorder.run(batch, counting=counting)
            # Ghost clipping keeps norms of the last batch until the next one's replace them:
            # a step is steady when it leaves as much behind as it found.
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
    """Take the experiment's own limit, else the target's memory, else this machine's."""
    if experiment.memory_limit_bytes is not None:
        return int(experiment.memory_limit_bytes)
    return psutil.virtual_memory().total if target is None else int(target.memory_bytes)


def _extend(peak: Peak) -> Peak:
    """Continue the straight line through two samples and three."""
    few = {batch: peak(batch) for batch in (1, 2, 3)}
    return lambda batch: few.get(batch) or few[2] + (batch - 2) * (few[3] - few[2])


def _explain(experiment: Experiment, needed: int, budget: int) -> str:
    return (
        f"{experiment.model_name} with {experiment.method} needs {needed / 2**20:,.0f} MiB for "
        f"one sample of {experiment.seq_len:,} tokens, and there are {budget / 2**20:,.0f} MiB"
    )
