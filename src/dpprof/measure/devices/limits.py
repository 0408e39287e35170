"""Measures how fast a device multiplies matrices, copies memory and launches operators.

A ceiling is an upper bound, so it is the fastest repeat at the best of several sizes; medians are
recorded too. Matrices hold normal random numbers, as in training: with zeros a GPU uses less power
and clocks higher.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from dpprof.experiments.config.target import DTYPES, Dtype
from dpprof.experiments.records.ceilings import Limits
from dpprof.measure.devices.device import Device, time_repeats
from dpprof.measure.devices.selection import open_device
from dpprof.private.errors import UnsupportedError

_CALLS = 1_000

Action = Callable[[], object]


class Extent(NamedTuple):
    """The sizes to measure, and for how long."""

    sizes: tuple[int, ...]  # rows of square matrices, the smallest first
    array_bytes: tuple[int, ...]  # bytes of arrays to copy, far larger than caches
    budget_s: float  # about how long all repeats of one size may take
    longest_s: float
    """A size is left out if one repeat would take longer, as on a CPU that emulates bfloat16."""


EXTENTS: Mapping[str, Extent] = {
    "cpu": Extent((256, 512, 1024, 2048), (2**28,), budget_s=0.3, longest_s=0.6),
    "cuda": Extent((1024, 2048, 4096, 8192, 16384), (2**30, 2**32), budget_s=0.3, longest_s=0.6),
}

_ROUNDS = 3
"""How often every figure is measured, so that a short disturbance cannot affect all its repeats."""


class _Timed(NamedTuple):
    """The seconds of every repeat by size, and why no larger size was measured."""

    seconds: dict[int, list[float]]
    stopped: str | None


def measure(name: str) -> Limits:
    """Measure ``cpu`` or ``cuda``, with the threads and the GPU that the environment sets."""
    extent = EXTENTS[name]
    extent = extent._replace(budget_s=extent.budget_s / _ROUNDS)
    return measure_limits(open_device(name), extent, _ROUNDS)


def measure_limits(device: Device, extent: Extent, rounds: int = 1) -> Limits:
    """Measure every figure in each round; the fastest repeat of all rounds counts.

    A figure that no round can measure is null, with the reason of the last round.
    """
    figures: dict[str, Callable[[], _Timed]] = {
        **{f"matmul.{dtype}": partial(_time_products, device, extent, dtype) for dtype in DTYPES},
        "bandwidth": partial(_time_copies, device, extent),
        "launch_latency_s": partial(_time_launches, device, extent),
    }
    timed: dict[str, list[_Timed]] = defaultdict(list)
    reasons: dict[str, str] = {}
    for _ in range(rounds):
        for key, figure in figures.items():
            try:
                timed[key].append(figure())
            except Exception as error:  # noqa: BLE001 (other figures may still be measured)
                reasons[key] = _describe_error(error)
    launches = [min(measured.seconds[_CALLS]) / _CALLS for measured in timed["launch_latency_s"]]
    return Limits.model_validate(
        {
            "matmul": {
                dtype: _state(timed[f"matmul.{dtype}"], "flops_per_s", "size", lambda n: 2 * n**3)
                for dtype in DTYPES
            },
            "bandwidth": _state(timed["bandwidth"], "bytes_per_s", "array_bytes", lambda n: 2 * n),
            "launch_latency_s": min(launches, default=None),
            "reasons": {key: reason for key, reason in reasons.items() if not timed[key]},
        }
    )


def _state(
    rounds: Sequence[_Timed], rate: str, size: str, work: Callable[[int], int]
) -> dict[str, Any] | None:
    """Return a ceiling's fields; None if no round measured it.

    ``rate`` and ``size`` name its fields; ``work`` returns the work of one repeat from its size.
    """
    if not rounds:
        return None
    widest = max(rounds, key=lambda timed: len(timed.seconds))
    samples: list[dict[str, Any]] = []
    for each in widest.seconds:
        seconds = [timed.seconds[each] for timed in rounds if each in timed.seconds]
        samples.append(
            {
                size: each,
                "seconds": min(map(min, seconds)),
                "median_s": statistics.median(map(statistics.median, seconds)),
                "repeats": sum(map(len, seconds)),
            }
        )
    fastest, best = max((work(timed[size]) / timed["seconds"], timed[size]) for timed in samples)
    return {rate: fastest, size: best, "samples": samples, "stopped": widest.stopped}


def _time_products(device: Device, extent: Extent, dtype: Dtype) -> _Timed:
    """Time products of square matrices, of 2 n^3 FLOPs each.

    Raises:
        UnsupportedError: The device has no products of this dtype.
    """
    device.use_precision(dtype)
    stored = getattr(torch, "float32" if dtype == "tf32" else dtype)
    options: Any = {"dtype": stored, "device": device.torch_device}

    def prepare(size: int) -> Action:
        left, right = (torch.randn(size, size, **options) for _ in range(2))
        return partial(torch.mm, left, right, out=torch.empty_like(left))

    return _time_sizes(device, extent, extent.sizes, 3, prepare)


def _time_copies(device: Device, extent: Extent) -> _Timed:
    """Time copies within the device's memory, which read and write every byte once.

    If a processor reads a cache line before it writes to it, this read is not counted.
    """

    def prepare(array_bytes: int) -> Action:
        # Write the array, because unwritten memory of a host is one shared page of zeros.
        source = torch.ones(array_bytes // 4, device=device.torch_device)
        return partial(torch.empty_like(source).copy_, source)

    return _time_sizes(device, extent, extent.array_bytes, 1, prepare)


def _time_launches(device: Device, extent: Extent) -> _Timed:
    """Time in-place additions to one element, a thousand in a row.

    This is the interval between small operators, including the host's work, and not the time from
    an operator's call to its end.
    """
    element = torch.zeros(1, device=device.torch_device)

    def launch() -> None:
        for _ in range(_CALLS):
            element.add_(1)

    return _time_sizes(device, extent, (_CALLS,), 1, lambda _: launch)


def _time_sizes(
    device: Device,
    extent: Extent,
    sizes: Sequence[int],
    power: int,
    prepare: Callable[[int], Action],
) -> _Timed:
    """Time one size after another, until one would take too long or does not fit in memory.

    The smallest size comes first. Time grows with ``power`` of the size.

    Raises:
        RuntimeError: The first size failed.
    """
    seconds: dict[int, list[float]] = {}
    before = 0
    for size in sizes:
        if seconds and min(seconds[before]) * (size / before) ** power > extent.longest_s:
            return _Timed(seconds, f"{size} would take longer than {extent.longest_s} s at a time")
        try:
            seconds[size] = time_repeats(partial(device.time, prepare(size)), extent.budget_s)
        except RuntimeError as error:  # most likely out of memory
            if not seconds:
                raise
            return _Timed(seconds, f"{size}: {_describe_error(error)}")
        before = size
    return _Timed(seconds, None)


def _describe_error(error: Exception) -> str:
    kind = "" if isinstance(error, UnsupportedError) else f"{type(error).__name__}: "
    return f"{kind}{error}"[:500]
