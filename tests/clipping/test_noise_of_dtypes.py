"""Noise has the stated standard deviation in every real number of every dtype, whoever draws it."""

import math

import pytest
import torch
from factory import make_experiment
from one_call import seeded
from small_models import Composed, Secure, default_dtype, take_step
from torch import Tensor, nn

from dpprof.private import BookKeeping, NoisyOptimizer
from dpprof.private.noise.noise import DRAWN_IN_TURN, NoiseOfStep, draw_noise, draw_secure_noise
from dpprof.private.noise.noise_keys import StepKey
from dpprof.private.refusals.tensor_kinds import NUMBERS
from dpprof.subjects.methods.microbatch import Microbatch
from dpprof.subjects.methods.training_step import Batch

DRAWS = 250_000
STD, SIZE = 3.0, 4.0


def parts_of(x: Tensor) -> list[Tensor]:
    return [x.real, x.imag] if x.is_complex() else [x]


def seeded_key() -> StepKey:
    return StepKey(b"", generator=seeded(11))


def make_numbers(dtype: torch.dtype) -> nn.Module:
    """A parameter of many numbers, whose loss is zero."""
    wide = torch.promote_types(dtype, torch.float32)
    numbers = torch.zeros(DRAWS, dtype=torch.float32).to(dtype)
    return Composed(lambda m, x: x[:, None] * m.numbers.to(wide).abs(), numbers=numbers)


def make_noisy(model: nn.Module, **options) -> tuple[BookKeeping, NoisyOptimizer]:
    clipping, sgd = BookKeeping(model, 0.5), torch.optim.SGD(model.parameters(), lr=1.0)
    kind = Secure if options.get("secure_mode") else torch.Generator
    options = {"expected_batch_size": 2, "generator": kind().manual_seed(5)} | options
    return clipping, NoisyOptimizer(sgd, clipping, **options)


@pytest.mark.parametrize(
    "kind",
    [{}, {"generator": None}, {"secure_mode": True}, {"secure_mode": True, "generator": None}],
)
@pytest.mark.parametrize("dtype", NUMBERS)
def test_each_part_of_a_parameter_gets_noise_of_the_whole_scale(dtype, kind) -> None:
    model = make_numbers(dtype)
    clipping, optimizer = make_noisy(model, noise_multiplier=2.0, **kind)
    clipping.backward(model(torch.zeros(2)).square().sum(1).float())
    optimizer.step()
    wide = torch.promote_types(dtype, torch.float32)
    parts = parts_of(model.numbers.detach().to(wide))
    for part in parts:
        assert float(part.double().std()) == pytest.approx(0.5, rel=0.01)
        assert abs(float(part.double().mean())) < 5 * 0.5 / math.sqrt(DRAWS)
    if len(parts) == 2:
        correlation = float((parts[0].double() * parts[1].double()).mean()) / 0.25
        assert abs(correlation) < 5 / math.sqrt(DRAWS)


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex64])
def test_the_reference_of_one_sample_at_a_time_draws_the_same_noise(dtype) -> None:
    model = make_numbers(dtype)
    options = {"batch_size": 2, "noise_multiplier": 2.0, "max_grad_norm": 0.5}
    step = Microbatch(model, make_experiment(method="microbatch", **options))
    labels = torch.zeros(2, dtype=torch.int64)
    step.compute_gradient(Batch(torch.zeros(2), labels), lambda _: None)
    for part in parts_of(model.numbers.grad):
        assert float(part.double().std()) == pytest.approx(0.5, rel=0.01)


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
@pytest.mark.parametrize("numel", [100_000, DRAWN_IN_TURN], ids=["at once", "in threads"])
def test_noise_of_a_sum_is_added_in_its_memory_whatever_its_strides(numel, dtype) -> None:
    for view in (lambda x: x, Tensor.t, lambda x: x[:, : x.shape[1] // 2]):
        summed = view(torch.zeros(100, numel // 100, dtype=dtype).fill_(8 + 4j))
        NoiseOfStep(STD, SIZE, seeded_key()).add_to(summed)
        assert float(summed.real.mean()) == pytest.approx(2, abs=0.1)
        assert float(summed.imag.mean()) == pytest.approx(1, abs=0.1)
        for part in parts_of(summed):
            assert float(part.std()) == pytest.approx(STD, rel=0.02)


def test_sums_that_get_noise_elsewhere_are_averaged_alone() -> None:
    first, other = (torch.full((3,), 8 + 4j) for _ in range(2))
    NoiseOfStep(STD, SIZE, seeded_key()).add_to(first, other)
    assert torch.equal(other, torch.full((3,), 2 + 1j))
    assert (first != 2 + 1j).all()


def test_a_conjugated_sum_is_refused_and_never_left_without_noise() -> None:
    with pytest.raises(RuntimeError, match="conj"):
        NoiseOfStep(STD, SIZE, seeded_key()).add_to(torch.ones(3, dtype=torch.complex64).conj())


@pytest.mark.parametrize("dtype", NUMBERS)
@pytest.mark.parametrize("default", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("way", [draw_noise, draw_secure_noise])
def test_noise_does_not_depend_on_the_default_dtype(way, default, dtype) -> None:
    like = torch.zeros(1_000, dtype=torch.float32).to(dtype)
    usual = way(STD, like, seeded(3))
    with default_dtype(default):
        drawn = way(STD, like, seeded(3))
    assert drawn.dtype == torch.promote_types(dtype, torch.float32)
    assert torch.equal(drawn, usual)


def test_secure_noise_under_a_default_dtype_of_16_bits_leaves_no_bit_of_the_sum_bare() -> None:
    """Draws of 16 bits lie on a coarse grid, and the sum's remainder would stay."""
    with default_dtype(torch.bfloat16):
        noise = draw_secure_noise(1.0, torch.zeros(10_000), seeded(1))
    large = noise[noise.abs() > 0.5]
    on_grid = large == large.to(torch.bfloat16).float()
    assert float(on_grid.float().mean()) < 0.01


def test_a_private_step_is_the_same_under_a_default_dtype_of_16_bits() -> None:
    def step(default: torch.dtype) -> Tensor:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 3), nn.RMSNorm(3))
        _, optimizer = make_noisy(model, noise_multiplier=1.0, secure_mode=True)
        x = torch.randn(3, 4)
        with default_dtype(default):
            for losses in (model(x).square().sum(1), torch.zeros(0)):
                take_step(optimizer, losses)
        return nn.utils.parameters_to_vector(model.parameters()).detach()

    assert torch.equal(step(torch.bfloat16), step(torch.float32))
