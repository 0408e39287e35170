"""Makes an operator's call again on a device, with other elements, and times it."""

import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from dpprof.devices.device import Device
from dpprof.flops.op_call import Layout, read_call

_NOISE = 2**22
"""Random numbers that tensors are filled from, again and again.

They are around 1: a square root of negative numbers, and a product of denormal ones, take up to 20
times as long as of others.
"""

_OTHER_DATA = 2**21
"""Numbers that are touched before each call, twice a common second-level cache: in a step too, an
operator's arguments are rarely the last data that were used."""

_MOST_REPEATS = 8


class Replayer:
    """Makes calls on a device.

    Args:
        device: The device.
        budget_s: About how long all repeats of one call may take.
        small_steps: Whether the calls are of a step whose data stay in a cache.
    """

    def __init__(self, device: Device, budget_s: float, *, small_steps: bool = False) -> None:
        self._device, self._budget_s, self._small_steps = device, budget_s, small_steps
        self._noise = 0.5 + torch.rand(_NOISE, device=device.torch_device)
        self._other_data = torch.ones(_OTHER_DATA, device=device.torch_device)

    def time(self, call: str) -> float:
        """Return the median seconds of a call from Python, after one to warm up.

        Raises:
            RuntimeError: The operator refuses the arguments, or they do not fit in memory.
            AttributeError: This PyTorch has no such operator.
        """
        function, args, kwargs = read_call(call, self.make, self._device.torch_device)

        def act() -> None:
            function(*args, **kwargs)

        return statistics.median(self._repeat(act))

    def _repeat(self, act: Callable[[], None]) -> list[float]:
        act()
        seconds = self._time(act, 1)
        while sum(seconds) < self._budget_s and len(seconds) < _MOST_REPEATS:
            seconds += self._time(act, len(seconds))
        return seconds

    def _time(self, act: Callable[[], None], repeats: int) -> list[float]:
        self._device.synchronize()
        clock = self._device.clock()
        for _ in range(repeats):
            if not self._small_steps:
                self._other_data.add_(1)
            clock.tick()
            act()
            clock.tick()
        return clock.durations_s()[::2]

    def make(self, layout: Layout) -> Tensor:
        """Make a tensor of a layout, with random elements."""
        shape, strides, dtype, bound = layout
        spans = [(size - 1) * stride for size, stride in zip(shape, strides, strict=True)]
        count = 0 if 0 in shape else 1 + sum(spans)
        flat = torch.empty(count, dtype=dtype, device=self._device.torch_device)
        if dtype.is_floating_point:
            for start in range(0, count, _NOISE):
                part = flat[start : start + _NOISE]
                part.copy_(self._noise[: len(part)])
        else:
            flat.random_(0, max(bound, 1))
        return flat.as_strided(shape, strides)
