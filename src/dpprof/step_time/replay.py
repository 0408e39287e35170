"""Makes an operator's call again on a device, with other elements, and times it."""

import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from dpprof.devices.device import Device
from dpprof.flops.op_call import Layout, read_call

_NOISE = 2**22
"""Random numbers that tensors are filled from, again and again.

They are between 0 and 1: of a negative number a square root takes 20 times as long.
"""

_MOST_REPEATS = 64


class Replayer:
    """Makes calls on a device.

    Args:
        device: The device.
        budget_s: About how long all repeats of one call may take.
    """

    def __init__(self, device: Device, budget_s: float) -> None:
        self._device, self._budget_s = device, budget_s
        self._noise = torch.rand(_NOISE, device=device.torch_device)

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
        clock.tick()
        for _ in range(repeats):
            act()
            clock.tick()
        return clock.durations_s()

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
