"""Kernels count as operators: fake tensors have their shape, counters their FLOPs."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from dpprof.norms import fused


@pytest.mark.parametrize(
    ("operator", "flops"),
    [
        (fused.gram_squares, 3 * 10 * 11 * (4 + 5)),  # 2 for each pair t >= s, and each column
        (fused.product_squares, 3 * 2 * 10 * 4 * 5),
    ],
    ids=["gram", "product"],
)
def test_shape_dtype_and_flops_without_a_device(operator, flops) -> None:
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        squares = operator(
            torch.empty(3, 10, 4, dtype=torch.bfloat16), torch.empty(3, 10, 5, dtype=torch.bfloat16)
        )

    assert squares.shape == (3,)
    assert squares.dtype == torch.float32
    assert counter.get_total_flops() == flops


def test_tensors_of_a_cpu_take_the_tiles() -> None:
    assert not fused.is_fused(torch.ones(1, 1, 1))
