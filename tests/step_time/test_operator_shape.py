"""Tests of what the time of an operator depends on."""

import pytest
import torch

from dpprof.predict.flops.op_call import describe_call
from dpprof.predict.step_time.own_table import outline

aten = torch.ops.aten


@pytest.mark.parametrize(
    ("other", "word"),
    [
        (torch.ones(6, 8), "whole"),
        (torch.ones(8), "part"),
        (torch.ones(6, 1), "by-row"),
        (torch.ones(1).expand(6, 8), "expanded"),
        (torch.ones(6, 16)[:, :8], "strided"),
        (torch.ones(8, 6).t(), "permuted"),
        (torch.ones(()), "one"),
    ],
)
def test_a_layout_says_how_each_tensor_lies_in_memory(other, word) -> None:
    call = describe_call(aten.mul.Tensor, (torch.ones(6, 8), other), {})
    assert outline(call) == (f"aten.mul.Tensor whole {word}", 8)


def test_calls_of_other_sizes_have_the_same_layout() -> None:
    layouts = {
        outline(describe_call(aten.mm.default, (torch.ones(n, 8), torch.ones(3, 8).t()), {}))[0]
        for n in (3, 5, 70)
    }
    assert len(layouts) == 1


def test_a_reduction_over_rows_is_not_one_over_columns() -> None:
    x = torch.ones(4, 6)
    rows, columns, negative = (
        outline(describe_call(aten.sum.dim_IntList, (x, [axis]), {}), is_reduction=True)[0]
        for axis in (0, 1, -1)
    )
    assert rows.endswith("1 of 2 axes without the last")
    assert columns.endswith("1 of 2 axes with the last")
    assert negative == columns


def test_what_an_operator_was_asked_to_compute_counts() -> None:
    call = '["aten.native_layer_norm_backward.default", [[true, false, true]], {}]'
    assert outline(call)[0].endswith("101")


def test_an_operator_without_tensors_goes_by_its_sizes() -> None:
    call = describe_call(aten.zeros.default, ([4, 16],), {})
    assert outline(call) == ("aten.zeros.default", 16)
