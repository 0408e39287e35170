"""Finds how many samples to clip at a time: on a CPU the fastest number, on a GPU the largest.

On a CPU the activations of few samples stay in its caches. On a GPU more samples use it better, as
long as they fit.
"""

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from numbers import Integral

import torch
from torch.optim import SGD, Optimizer

from dpprof.private.capture.step_graphs import buffers_kept
from dpprof.private.engine.engine import Clipping
from dpprof.private.loop.method_choice import FirstBatch
from dpprof.private.norms import placement
from dpprof.private.samples.batches import take
from dpprof.private.samples.random_state import random_state_kept

AUTO = "auto"

_MOST_S = 20.0  # no further size is tried once the tries have taken so long
_ALIKE = 1.02  # times that differ by less are equal: fewer samples need less memory
_USED = 0.9  # of the free memory: other lengths and fragments need the rest

_log = logging.getLogger("dpprof")


def read_max_batch_size(size: int | str | None, unit: str = "sample") -> int | None:
    """Return the number, or None where there is none yet (``ValueError`` for other words)."""
    if not isinstance(size, str):
        if size is not None and (isinstance(size, bool) or not isinstance(size, Integral)):
            raise ValueError(f"max_batch_size must be a whole number, and is {size!r}")
        return None if size is None else int(size)
    if size != AUTO:
        raise ValueError(f"max_batch_size must be a number or {AUTO}, and is {size!r}")
    if unit == "user":
        raise ValueError("with unit='user' max_batch_size must be a number, and is 'auto'")
    return None


def find_max_batch_size(
    clipping: Clipping, optimizer: Optimizer, first: FirstBatch, expected: float
) -> int:
    """Find how many samples to clip at a time, by clipping copies of some; nothing of that stays.

    A line of the logger ``dpprof`` says why. The samples of ``first`` are as long as others,
    and the mean batch size is ``expected``.
    """
    most = math.ceil(expected + 4 * math.sqrt(expected))  # more are drawn once in 30,000 steps
    parameter = next(clipping.model.parameters())
    device = parameter.device
    buffers = getattr(clipping.sums.owner, "buffers", None)

    def run(size: int) -> None:
        places = [at % first.samples for at in range(size)]
        clipping.backward(first.losses_of(*take(list(first.batch), first.samples, places)))
        clipping.sums.forget()

    def measure_peak(size: int) -> int:
        torch.cuda.reset_peak_memory_stats(device)
        run(size)
        return torch.cuda.max_memory_allocated(device)

    with _unnoticed(clipping):
        if not placement.is_cuda(parameter):
            return choose_fastest(partial(_measure_s, run), most)
        free, _ = torch.cuda.mem_get_info(device)
        room = free + torch.cuda.memory_reserved(device) - _bytes_of_state(clipping, optimizer)
        room -= 0 if buffers is None else buffers.count_bytes(clipping.parameters)
        return choose_largest(measure_peak, room, most)


def choose_fastest(measure_s: Callable[[int], float], most: int) -> int:
    """Return the power of two, or ``most``, that takes the least time for each sample."""
    begun, times = time.monotonic(), dict[int, float]()
    for size in [2**power for power in range(most.bit_length()) if 2**power < most] + [most]:
        times[size] = measure_s(size) / size
        if time.monotonic() - begun > _MOST_S:
            break
    best = min(times.values())
    chosen = min(size for size, each_s in times.items() if each_s <= _ALIKE * best)
    told = ", ".join(f"{size}: {1e3 * each_s:,.3g} ms" for size, each_s in times.items())
    _log.info("max_batch_size %d: the least time for each sample (%s)", chosen, told)
    return chosen


def choose_largest(measure_peak: Callable[[int], int], room: int, most: int) -> int:
    """Return the most samples that fit, by the peaks of one and of two, and a try of that."""
    one, two = measure_peak(1), measure_peak(2)
    each = max(1, two - one)
    chosen = max(1, min(most, 1 + (round(_USED * room) - one) // each))
    try:
        peak = measure_peak(chosen)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        _log.warning("max_batch_size %d: %d were predicted to fit, and do not", chosen // 2, chosen)
        return max(1, chosen // 2)
    told = f"{peak / 2**30:,.2f} of {room / 2**30:,.2f} GiB"
    _log.info("max_batch_size %d: the most that fit, or are drawn (%s)", chosen, told)
    return chosen


def _measure_s(run: Callable[[int], None], size: int) -> float:
    """Return the least seconds of two runs, after one that allocates."""
    times = []
    for _ in range(3):
        begun = time.perf_counter()
        run(size)
        times.append(time.perf_counter() - begun)
    return min(times[1:])


def _bytes_of_state(clipping: Clipping, optimizer: Optimizer) -> int:
    """Return the bytes that an optimizer will make in its first step: as Adam does, or SGD."""
    if optimizer.state:
        return 0
    momenta = 2
    if isinstance(optimizer, SGD):
        momenta = int(any(group["momentum"] for group in optimizer.param_groups))
    return momenta * sum(p.numel() * p.element_size() for p in clipping.parameters)


@contextmanager
def _unnoticed(clipping: Clipping) -> Iterator[None]:
    """Restore random states, counts and sums at the end."""
    names = ("batches", "failures", "nonfinite_samples", "nonfinite_samples_total", "plan")
    before = {name: getattr(clipping, name) for name in (*names, "sample_norms")}
    steps = clipping.forwards.steps
    with (
        random_state_kept(),
        buffers_kept(clipping.model),
        clipping.sums.put_aside(),
        clipping.first_batch_trusted(),
    ):
        clipping.sums.owner = before  # or sums would be added to .grad
        try:
            yield
        finally:
            vars(clipping).update(before)
            clipping.forwards.steps = steps
