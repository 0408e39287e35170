"""Which axes a reduction's arguments name, whatever its overload."""

import pytest
import torch
from torch import Tensor

from dpprof.memory.cuda_workspaces import cuda_workspaces
from dpprof.memory.reduction_buffers import Processors, reduction_buffers

aten = torch.ops.aten
H100 = Processors.of(132, "9.0")
ALL, ROWS = (), (0,)


@pytest.mark.parametrize(
    ("packet", "args", "dims", "size"),
    [
        (aten.sum, (), ALL, 4),
        (aten.sum, ([0],), ROWS, 4),
        (aten.sum, ([],), ALL, 4),
        (aten.prod, (0,), ROWS, 4),
        (aten.linalg_vector_norm, (2,), ALL, 4),  # 2 is its order, and no axis
        (aten.linalg_vector_norm, (2, [0]), ROWS, 4),
        (aten.amax, ([0],), ROWS, 4),
        (aten.argmax, (0,), ROWS, 16),
        (aten.max, (), ALL, 4),
        (aten.max, (0,), ROWS, 16),
        (aten.any, (0,), ROWS, 1),
    ],
)
def test_axes_are_told_from_other_arguments(packet, args, dims, size) -> None:
    x = torch.empty(8192, 2048, device="meta")
    told = cuda_workspaces(H100)[packet](x, *args)
    assert told == reduction_buffers(x, dims, size, H100)
    assert sum(told) > 0


def test_an_elementwise_maximum_has_no_buffer() -> None:
    x = torch.empty(8192, 2048, device="meta")
    assert cuda_workspaces(H100)[aten.max](x, x) == ()


def test_a_variance_over_all_is_no_axis() -> None:
    x = torch.empty(8192, 2048, device="meta")
    over_all = cuda_workspaces(H100)[aten.var]
    assert over_all(x, True) == over_all(x) == reduction_buffers(x, (), 16, H100, 2)


def test_without_processors_no_reduction_is_known() -> None:
    assert aten.sum not in cuda_workspaces(None)


def test_many_short_rows_leave_partial_gradients_of_a_norm() -> None:
    """32 rows a block, and at most 32,768 blocks; once for the weight and once for the bias."""
    take = cuda_workspaces(H100)[aten.native_layer_norm_backward]

    def partial_gradients(rows: int, width: int, mask: list[bool]) -> list[int]:
        x: Tensor = torch.empty(rows, width, device="meta")
        return list(take(x, x, [width], x, x, None, None, mask))

    assert partial_gradients(2**17, 64, [True, True, True]) == [2**12 * 64 * 4] * 2
    assert partial_gradients(2**17, 64, [True, True, False]) == [2**12 * 64 * 4]
    assert partial_gradients(2**16, 64, [True, True, True]) == []  # too few rows
    assert partial_gradients(2**17, 4096, [True, True, True]) == []  # wide enough as it is
