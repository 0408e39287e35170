"""What a GPU's tensor cores and launches ask for, tried without one under fake tensors."""

from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from dpprof.clipping.contributions import Product
from dpprof.norms.placement import (
    as_if_on_cuda,
    follows_cuda_autocast,
    is_cuda,
    simulates_kernels,
)
from dpprof.norms.scale import scale_gradients
from dpprof.norms.tiles import SQUARED_AT_ONCE, multiply, square


class Names(TorchDispatchMode):
    """Collects the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def operators(run, *, on_cuda: bool) -> list[str]:
    with (
        as_if_on_cuda(kernels=False) if on_cuda else nullcontext(),
        FakeTensorMode(),
        Names() as names,
    ):
        run()
    return names.seen


def factors(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16)


@pytest.mark.parametrize("on_cuda", [True, False])
def test_16_bits_are_multiplied_into_float32_by_one_product_on_a_gpu(on_cuda) -> None:
    kept = operators(lambda: multiply(factors(2, 8, 2048), factors(2, 2048, 9)), on_cuda=on_cuda)
    summed = operators(
        lambda: Product(factors(2, 2048, 8), factors(2, 2048, 9)).sum(torch.empty(2)),
        on_cuda=on_cuda,
    )

    assert ("aten.bmm.dtype" in kept, "aten.mm.dtype" in summed) == (on_cuda, on_cuda)
    assert (sum("baddbmm" in name for name in kept) == 4) == (not on_cuda)
    assert (sum("addmm_" in name for name in summed) == 8) == (not on_cuda)


@pytest.mark.parametrize(("on_cuda", "norms"), [(True, 1), (False, 5)])
def test_a_squared_norm_is_one_launch_on_a_gpu(on_cuda, norms) -> None:
    a = operators(lambda: square(factors(2, 5, SQUARED_AT_ONCE)), on_cuda=on_cuda)

    assert sum("vector_norm" in name for name in a) == norms


@pytest.mark.parametrize(("on_cuda", "sums"), [(True, 1), (False, 4)])
def test_a_scales_gradient_takes_all_tokens_at_once_on_a_gpu(on_cuda, sums) -> None:
    names = operators(
        lambda: scale_gradients(factors(2, 64, 8), factors(2, 64, 8), None, factors(2, 64, 1)),
        on_cuda=on_cuda,
    )

    assert sum("aten.sum" in name for name in names) == sums


def answers() -> tuple[bool, bool, bool]:
    x = torch.ones(1)
    return follows_cuda_autocast(x), is_cuda(x), simulates_kernels()


def test_the_innermost_switch_counts_and_is_taken_back() -> None:
    assert answers() == (False, False, False)
    with as_if_on_cuda():
        assert answers() == (True, True, True)
        with as_if_on_cuda(autocast=False, kernels=False):
            assert answers() == (False, True, False)
        assert answers() == (True, True, True)
    assert answers() == (False, False, False)


def fail_on_cuda() -> None:
    with as_if_on_cuda():
        raise KeyError


def test_an_exception_takes_the_switch_back() -> None:
    with as_if_on_cuda(products=False):
        with pytest.raises(KeyError):
            fail_on_cuda()
        assert answers() == (True, False, True)

    assert answers() == (False, False, False)
