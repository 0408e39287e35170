"""What a GPU's tensor cores and launches ask for, tried without one under fake tensors."""

from contextlib import nullcontext

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from dpprof.private.contributions.contributions import Product
from dpprof.private.norms import triton_ops
from dpprof.private.norms.placement import as_if_on_cuda, is_cuda, is_simulated
from dpprof.private.norms.scale import scale_gradients
from dpprof.private.norms.tiles import SQUARED_AT_ONCE, multiply, square


class Names(TorchDispatchMode):
    """Collects the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def count(operator: str, run, *, on_cuda: bool) -> int:
    with as_if_on_cuda() if on_cuda else nullcontext(), FakeTensorMode(), Names() as names:
        run()
    return sum(operator in name for name in names.seen)


def factors(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16)


def multiply_matrices() -> None:
    multiply(factors(2, 8, 2048), factors(2, 2048, 9))


def sum_product() -> None:
    Product(factors(2, 2048, 8), factors(2, 2048, 9)).sum(torch.empty(2))


def scale() -> None:
    scale_gradients(factors(2, 2048, 8), factors(2, 2048, 8), None, factors(2, 2048, 1))


@pytest.mark.parametrize(
    ("run", "operator", "gpu", "cpu"),
    [
        (multiply_matrices, "aten.bmm.dtype", 1, 0),
        (multiply_matrices, "baddbmm", 0, 4),
        (sum_product, "aten.mm.dtype", 1, 0),
        (sum_product, "addmm_", 0, 8),
        (lambda: square(factors(2, 5, SQUARED_AT_ONCE)), "vector_norm", 1, 5),
        (scale, "aten.sum", 1, 4),
    ],
)
def test_a_gpu_takes_few_launches_and_16_bit_products(run, operator, gpu, cpu, monkeypatch) -> None:
    monkeypatch.setattr(triton_ops, "is_fused", lambda _: False)
    assert (count(operator, run, on_cuda=True), count(operator, run, on_cuda=False)) == (gpu, cpu)


def answers() -> tuple[bool, bool]:
    return is_cuda(torch.ones(1)), is_simulated()


def test_an_exception_takes_the_simulation_back() -> None:
    with as_if_on_cuda():
        with pytest.raises(KeyError), as_if_on_cuda():
            raise KeyError
        assert answers() == (True, True)
    assert answers() == (False, False)
