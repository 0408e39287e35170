"""Norms are float32 where the training's own products are TF32."""

from collections import defaultdict

import pytest
import torch
from factory import make_experiment

from dpprof.private.norms.float32_products import exact_products, name_precision
from dpprof.subjects.setup import import_method, set_up

matmul = torch.backends.cuda.matmul


pytestmark = pytest.mark.usefixtures("tf32")


@pytest.mark.parametrize("method", ["flash", "flash-bk", "per-layer"])
def test_norms_take_float32_products_and_the_training_those_that_it_may(method) -> None:
    seen, kernels = defaultdict(set), defaultdict(set)

    def watch(_layer, path, sampler, inputs):
        seen[path].add(matmul.fp32_precision)
        kernels[path].add(name_precision(torch.float32))
        return sampler(*inputs)

    experiment = make_experiment(method=method, seq_len=4)
    training = set_up(experiment, import_method(experiment), torch.device("cpu"), lambda *_: None)
    with training.step.watch_samplers(watch):
        training.step.run(training.batch, lambda phase: seen[phase].add(matmul.fp32_precision))

    assert seen["tiled gram"] == {"ieee"}
    assert kernels["tiled gram"] == {"tf32x3"}
    assert seen["sample gradients"] == {"tf32"}  # their norms are those of what is released
    assert seen["forward"] == seen["backward"] == seen["step"] == {"tf32"}


def fail() -> None:
    assert matmul.fp32_precision == "ieee"
    raise ZeroDivisionError


def test_an_error_leaves_the_setting_as_it_was() -> None:
    with pytest.raises(ZeroDivisionError), exact_products():
        fail()

    assert matmul.fp32_precision == "tf32"
    assert torch.get_float32_matmul_precision() == "high"


def test_kernels_round_operands_to_tf32_three_times() -> None:
    assert name_precision(torch.float32) == "tf32x3"
    assert name_precision(torch.bfloat16) == "ieee"
    torch.set_float32_matmul_precision("highest")
    assert name_precision(torch.float32) == "ieee"


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Round to the nearest number of 11 significant bits, as ``cvt.rna.tf32.f32`` does."""
    return ((x.view(torch.int32) + 0x1000) & ~0x1FFF).view(torch.float32)


def test_three_products_of_rounded_operands_are_as_exact_as_the_bound_says() -> None:
    x, y = (torch.randn(10_000, generator=torch.Generator().manual_seed(seed)) for seed in (0, 1))
    large_x, large_y = rounded(x), rounded(y)
    small_x, small_y = rounded(x - large_x), rounded(y - large_y)
    terms = (large_x, large_y), (small_x, large_y), (large_x, small_y)
    product = sum(a.double() * b.double() for a, b in terms)
    exact = x.double() * y.double()
    cut = [(each.view(torch.int32) & ~0x1FFF).view(torch.float32).double() for each in (x, y)]

    off = (product - exact).abs() / exact.abs()
    assert off.max() <= 3 * 2**-22
    low = 1 - (cut[0] * cut[1]) / exact
    assert 2**-10 < low.max() <= 2**-9
    assert low.min() >= 0
