"""Makes an operator's call again on a device, with other elements, and times it."""

import statistics

import torch
from torch import Tensor

from dpprof.measure.devices.device import Device, time_repeats
from dpprof.predict.flops.op_call import Layout, read_call

CALL_S = 0.01  # about how long all repeats of one call may take

_MOST_REPEATS = 8
_NOISE = 2**22
"""Random numbers that tensors are filled from, again and again.

They are around 1: square roots of negative numbers and products of denormal numbers take up to 20
times as long as others.
"""

_OTHER_DATA = 2**21
"""Numbers that are touched before each call, twice a common second-level cache: in a step too, an
operator's arguments are rarely the last data that were used."""


class Replayer:
    """Makes calls on a device.

    With ``small_steps`` the calls are of a step whose data stay in a cache.
    """

    def __init__(self, device: Device, *, small_steps: bool = False) -> None:
        self._device = device
        self._noise = 0.5 + torch.rand(_NOISE, device=device.torch_device)
        touched = 0 if small_steps else _OTHER_DATA
        self._other_data = torch.ones(touched, device=device.torch_device)

    def time(self, call: str) -> float:
        """Return the median seconds of a call from Python, after one to warm up.

        Raises:
            RuntimeError: The operator refuses the arguments, or they do not fit in memory.
            AttributeError: This PyTorch has no such operator.
        """
        function, args, kwargs = read_call(call, self.make, self._device.torch_device)

        def time_calls(repeats: int) -> list[float]:
            self._device.synchronize()
            marks = []
            for _ in range(repeats):
                self._other_data.add_(1)
                marks.append(self._device.mark())
                function(*args, **kwargs)
                marks.append(self._device.mark())
            return self._device.durations_s(marks)[::2]

        return statistics.median(time_repeats(time_calls, CALL_S, _MOST_REPEATS))

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
