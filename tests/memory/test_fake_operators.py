"""Operators on fake tensors return the same when they are remembered."""

from itertools import product
from math import prod

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from dpprof.predict.memory.fake_operators import FakeOperators
from dpprof.private.norms.placement import as_if_on_cuda

aten = torch.ops.aten


def describe(value: object) -> object:
    if isinstance(value, list | tuple):
        return type(value), [describe(one) for one in value]
    if not isinstance(value, Tensor):
        return value
    storage = value.untyped_storage().nbytes()
    return (
        *(value.shape, value.stride(), value.storage_offset(), value.dtype, storage),
        value.requires_grad,
    )


CALLS = {
    "new": (aten.add.Tensor, lambda x, y: (x, y)),
    "dense strides": (aten.mul.Tensor, lambda x, y: (x.t(), y.t())),
    "no elements": (aten.mul.Tensor, lambda x, y: (x[:0], y[:0])),
    "view": (aten.view.default, lambda x, _: (x, [2, 10])),
    "view of a slice": (aten.t.default, lambda x, _: (x[1:, 2:],)),
    "in place": (aten.add_.Tensor, lambda x, y: (x, y)),
    "several": (aten.split.Tensor, lambda x, _: (x, 2)),
    "of each": (aten._foreach_mul.List, lambda x, y: ([x, y], [y, y])),
    "shape from elements": (aten._local_scalar_dense.default, lambda *_: (torch.tensor(3.0),)),
    "shape in place": (aten.squeeze_.dim, lambda x, _: (x[:1].clone(), 0)),
    "type": (aten.sum.dim_IntList, lambda x, _: (x, [0], True)),
    "number": (aten.sum.dim_IntList, lambda x, _: (x, [0], 1)),
}


@pytest.mark.parametrize(("func", "arguments"), CALLS.values(), ids=CALLS)
def test_a_remembered_result_is_that_of_the_mode(func, arguments) -> None:
    described = []
    for turn in range(3):
        with FakeTensorMode() as mode:
            run = FakeOperators(mode) if turn else lambda func, args, _: func(*args)
            x, y = torch.empty(4, 5), torch.empty(4, 5)
            given = arguments(x, y)
            out = run(func, given, {})
            tensors = [out] if isinstance(out, Tensor) else out
            first = given[0]
            shared = isinstance(first, Tensor) and [
                one.untyped_storage()._cdata == first.untyped_storage()._cdata
                for one in (tensors if isinstance(tensors, list | tuple) else [])
            ]
            described.append((describe(out), describe(first), shared, out is first))
    assert described[0] == described[1] == described[2]


def test_each_result_has_a_storage_of_its_own() -> None:
    with FakeTensorMode() as mode:
        run = FakeOperators(mode)
        x = torch.empty(3)
        one, other = (run(aten.neg.default, (x,), {}) for _ in range(2))
        assert one.untyped_storage()._cdata != other.untyped_storage()._cdata


def test_arguments_that_were_the_same_tensor_may_be_different_later() -> None:
    with FakeTensorMode() as mode:
        run = FakeOperators(mode)
        x, y = torch.empty(7), torch.empty(7)
        for first, out in ((x, x), (x, y)):
            assert run(aten.mul.out, (first, x), {"out": out}) is out
        view = run(aten.expand_as.default, (x, x), {})
        assert view.untyped_storage()._cdata == x.untyped_storage()._cdata
        view = run(aten.expand_as.default, (y, x), {})
        assert view.untyped_storage()._cdata == y.untyped_storage()._cdata


def test_what_a_result_depends_on_is_told_apart() -> None:
    with FakeTensorMode() as mode:
        run = FakeOperators(mode)
        x = torch.empty(6)
        assert run(aten.empty.memory_format, ([2],), {}).dtype == torch.float32
        torch.set_default_dtype(torch.float64)
        try:
            assert run(aten.empty.memory_format, ([2],), {}).dtype == torch.float64
        finally:
            torch.set_default_dtype(torch.float32)
        assert run(aten.add.Scalar, (x.int(), 1), {}).dtype == torch.int32
        assert run(aten.add.Scalar, (x.int(), 1.0), {}).dtype == torch.float32
        assert run(aten.sum.default, (x,), {"dtype": torch.float64}).dtype == torch.float64
        assert run(aten.sum.default, (x,), {}).dtype == torch.float32


def run_group_norm(run, shape, layouts, dtypes):
    """Run it and its derivative; the layouts are of the input and of the gradient given."""
    dtype, dtype_of_weight = dtypes
    x, gradient = (torch.ones(shape, dtype=dtype).contiguous(memory_format=one) for one in layouts)
    weight = None if dtype_of_weight is None else torch.ones(shape[1], dtype=dtype_of_weight)
    sizes = *shape[:2], prod(shape[2:]), 3 if shape[1] % 3 == 0 else 1
    y, mean, rstd = run(aten.native_group_norm.default, (x, weight, weight, *sizes, 1e-5), {})
    asked = [True, weight is not None, False]
    given = gradient, x, mean, rstd, weight, *sizes, asked
    return y, mean, rstd, *run(aten.native_group_norm_backward.default, given, {})


SHAPES_OF_IMAGES = [(2, 6, 4, 5), (2, 6, 1, 1), (2, 1, 4, 5), (1, 3, 1, 5), (2, 6, 4, 1)]
LAYOUTS = [torch.contiguous_format, torch.channels_last]
DTYPES = [
    *((torch.float32, None), (torch.float64, torch.float64)),
    *((torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32)),
]


@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES_OF_IMAGES, ids=str)
def test_group_norm_lays_results_out_as_it_does_on_a_cpu(shape, dtypes) -> None:
    """PyTorch's own fake operators do not: which layout they return depends on the release."""
    for layouts in product(LAYOUTS, LAYOUTS):
        given = shape, layouts, dtypes
        expected = run_group_norm(lambda func, args, _: func(*args), *given)
        with FakeTensorMode() as mode:
            found = run_group_norm(FakeOperators(mode), *given)

        assert describe(found) == describe(expected)


@pytest.mark.parametrize("shape", [(2, 6, 7), (2, 6), (2, 6, 3, 4, 5)], ids=str)
def test_group_norm_takes_any_number_of_axes(shape) -> None:
    last = torch.channels_last_3d if len(shape) == 5 else torch.contiguous_format
    given = shape, (last, last), (torch.float32, torch.float32)
    expected = run_group_norm(lambda func, args, _: func(*args), *given)
    with FakeTensorMode() as mode:
        assert describe(run_group_norm(FakeOperators(mode), *given)) == describe(expected)


def test_group_norm_returns_contiguous_results_on_cuda() -> None:
    """As group_norm.cpp has it."""
    given = (2, 6, 4, 5), LAYOUTS[1:] * 2, (torch.float32, torch.float32)
    with FakeTensorMode() as mode, as_if_on_cuda():
        y, _, _, of_x, of_weight, of_bias = run_group_norm(FakeOperators(mode), *given)

    assert y.is_contiguous()
    assert of_x.is_contiguous()
    assert of_weight.shape == (6,)
    assert of_bias is None
