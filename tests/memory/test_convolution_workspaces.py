"""What convolutions allocate on a CPU, compared with the allocator's own events."""

from functools import partial

import pytest
import torch
from allocator_events import find_peak

from dpprof.predict.memory.cpu_workspaces import CPU_WORKSPACES

aten = torch.ops.aten
CASES = [
    # images, channels, outputs, kernel, stride, height, groups
    (8, 64, 64, 3, 1, 32, 1),
    (8, 20, 24, 3, 1, 32, 1),
    (8, 256, 256, 3, 1, 8, 1),
    (8, 64, 128, 1, 1, 16, 1),
    (2, 128, 128, 3, 1, 16, 8),
]


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="layouts differ by processor"
)
@pytest.mark.parametrize("sizes", CASES)
def test_workspaces_are_those_that_the_allocator_reports(sizes) -> None:
    images, channels, outputs, kernel, stride, side, groups = sizes
    x = torch.randn(images, channels, side, side)
    weight = torch.randn(outputs, channels // groups, kernel, kernel)
    settings = [stride] * 2, [kernel // 2] * 2, [1, 1], False, [0, 0], groups
    gradient = torch.randn_like(aten.convolution(x, weight, None, *settings))
    masks = [True, True, False], [False, True, False], [True, False, False]
    calls = [(aten.convolution, (x, weight, None, *settings))]
    calls += [
        (aten.convolution_backward, (gradient, x, weight, [0], *settings, mask)) for mask in masks
    ]
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        peaks = [find_peak(partial(operator, *args)) for operator, args in calls]
    finally:
        torch.set_num_threads(threads)

    assert [sum(CPU_WORKSPACES[operator](*args)) for operator, args in calls] == peaks
