"""Measures how fast a device multiplies matrices, copies memory and launches operators.

A ceiling is an upper bound, so it is the fastest repeat at the best of several sizes; medians are
recorded too. Matrices hold normal random numbers, as in training: with zeros a GPU uses less power
and clocks higher.
"""

import statistics
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch

from dpprof.devices.device import Device
from dpprof.devices.selection import open_device
from dpprof.records.ceilings import Bandwidth, CopySample, Limits, Matmul, ProductSample, Repeated
from dpprof.spec.registry import UnsupportedError
from dpprof.spec.target import DTYPES, Dtype

_TORCH: Mapping[Dtype, torch.dtype] = {
    "float32": torch.float32,
    "tf32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float64": torch.float64,
}
_CALLS = 1_000
_MOST_REPEATS = 1_000

Action = Callable[[], object]
_Measured = TypeVar("_Measured")
_CeilingT = TypeVar("_CeilingT", Matmul, Bandwidth)


class Extent(NamedTuple):
    """The sizes to measure, and for how long."""

    sizes: tuple[int, ...]
    """Of square matrices, the smallest first."""

    array_bytes: tuple[int, ...]
    """Of arrays to copy, far larger than caches."""

    budget_s: float
    """About how long all repeats of one size may take."""

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
    device, extent = open_device(name), EXTENTS[name]
    extent = extent._replace(budget_s=extent.budget_s / _ROUNDS)
    return keep_fastest([measure_limits(device, extent) for _ in range(_ROUNDS)])


def keep_fastest(rounds: Sequence[Limits]) -> Limits:
    """Return the fastest figures of several rounds; null figures keep the last round's reason."""
    products = {
        dtype: _fastest([one.matmul[dtype] for one in rounds], ProductSample, "flops_per_s", "size")
        for dtype in DTYPES
    }
    copies = [one.bandwidth for one in rounds]
    bandwidth = _fastest(copies, CopySample, "bytes_per_s", "array_bytes")
    launches = [one.launch_latency_s for one in rounds if one.launch_latency_s is not None]
    figures: dict[str, object] = {f"matmul.{dtype}": one for dtype, one in products.items()}
    figures |= {"bandwidth": bandwidth, "launch_latency_s": launches or None}
    reasons = {key: reason for one in rounds for key, reason in one.reasons.items()}
    return Limits(
        matmul=products,
        bandwidth=bandwidth,
        launch_latency_s=min(launches, default=None),
        reasons={key: reason for key, reason in reasons.items() if figures[key] is None},
    )


def _fastest(
    found: Sequence[_CeilingT | None], sample: type[Repeated], rate: str, size: str
) -> _CeilingT | None:
    """Merge the samples of several rounds by size; the highest rate counts."""
    known = [one for one in found if one is not None]
    if not known:
        return None
    alike: dict[int, list[Repeated]] = defaultdict(list)
    for repeated in (sample for one in known for sample in one.samples):
        alike[getattr(repeated, size)].append(repeated)
    samples = [
        sample.model_validate(
            {
                size: of_size,
                "seconds": min(one.seconds for one in some),
                "median_s": statistics.median(one.median_s for one in some),
                "repeats": sum(one.repeats for one in some),
            }
        )
        for of_size, some in sorted(alike.items())
    ]
    fastest = max(known, key=lambda one: float(getattr(one, rate)))
    widest = max(known, key=lambda one: len(one.samples))
    return fastest.model_copy(update={"samples": samples, "stopped": widest.stopped})


def measure_limits(device: Device, extent: Extent) -> Limits:
    """Measure every figure; one that cannot be measured is null with the reason."""
    reasons: dict[str, str] = {}

    def attempt(key: str, figure: Callable[[], _Measured]) -> _Measured | None:
        try:
            return figure()
        except Exception as error:  # noqa: BLE001 (other figures may still be measured)
            reasons[key] = _describe_error(error)
            return None

    products = {
        dtype: attempt(f"matmul.{dtype}", partial(measure_products, device, extent, dtype))
        for dtype in DTYPES
    }
    return Limits(
        matmul=products,
        bandwidth=attempt("bandwidth", partial(measure_copies, device, extent)),
        launch_latency_s=attempt("launch_latency_s", partial(measure_launches, device, extent)),
        reasons=reasons,
    )


def measure_products(device: Device, extent: Extent, dtype: Dtype) -> Matmul:
    """Measure products of square matrices, of 2 n^3 FLOPs each.

    Raises:
        UnsupportedError: The device has no products of this dtype.
        RuntimeError: The smallest product failed.
    """
    device.use_precision(dtype)
    options: Any = {"dtype": _TORCH[dtype], "device": device.torch_device}

    def prepare(size: int) -> Action:
        left, right = (torch.randn(size, size, **options) for _ in range(2))
        return partial(torch.mm, left, right, out=torch.empty_like(left))

    timed = _time_sizes(device, extent, extent.sizes, 3, prepare)
    samples = [ProductSample(size=n, **_sum_up(s)) for n, s in timed.seconds.items()]
    flops_per_s, size = max((2 * one.size**3 / one.seconds, one.size) for one in samples)
    return Matmul(flops_per_s=flops_per_s, size=size, samples=samples, stopped=timed.stopped)


def measure_copies(device: Device, extent: Extent) -> Bandwidth:
    """Measure copies within the device's memory, which read and write every byte once.

    If a processor reads a cache line before it writes to it, this read is not counted.

    Raises:
        RuntimeError: The smallest copy failed.
    """

    def prepare(array_bytes: int) -> Action:
        # Write the array, because unwritten memory of a host is one shared page of zeros.
        source = torch.ones(array_bytes // 4, device=device.torch_device)
        return partial(torch.empty_like(source).copy_, source)

    timed = _time_sizes(device, extent, extent.array_bytes, 1, prepare)
    samples = [CopySample(array_bytes=size, **_sum_up(s)) for size, s in timed.seconds.items()]
    rate, size = max((2 * one.array_bytes / one.seconds, one.array_bytes) for one in samples)
    return Bandwidth(bytes_per_s=rate, array_bytes=size, samples=samples, stopped=timed.stopped)


def measure_launches(device: Device, extent: Extent) -> float:
    """Return the seconds of an in-place addition to one element, one of a thousand in a row.

    This is the interval between small operators, including the host's work, and not the time from
    an operator's call to its end.
    """
    element = torch.zeros(1, device=device.torch_device)

    def launch() -> None:
        for _ in range(_CALLS):
            element.add_(1)

    return min(time_repeats(device, launch, extent.budget_s)) / _CALLS


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
            seconds[size] = time_repeats(device, prepare(size), extent.budget_s)
        except RuntimeError as error:  # most likely out of memory
            if not seconds:
                raise
            return _Timed(seconds, f"{size}: {_describe_error(error)}")
        before = size
    return _Timed(seconds, None)


def time_repeats(device: Device, act: Action, budget_s: float) -> list[float]:
    """Time repeats of an action, after one to warm up, until the budget is used.

    The number of repeats doubles between reads of the clock, because a read makes the host wait
    for the device.

    Returns:
        The seconds of each repeat; at least one.
    """
    _time(device, act, 1)
    seconds = _time(device, act, 1)
    while sum(seconds) < budget_s and len(seconds) < _MOST_REPEATS:
        seconds += _time(device, act, len(seconds))
    return seconds


def _time(device: Device, act: Action, repeats: int) -> list[float]:
    device.synchronize()
    clock = device.clock()
    clock.tick()
    for _ in range(repeats):
        act()
        clock.tick()
    return clock.durations_s()


def _sum_up(seconds: Sequence[float]) -> dict[str, Any]:
    median_s = statistics.median(seconds)
    return {"seconds": min(seconds), "median_s": median_s, "repeats": len(seconds)}


def _describe_error(error: Exception) -> str:
    kind = "" if isinstance(error, UnsupportedError) else f"{type(error).__name__}: "
    return f"{kind}{error}"[:500]
