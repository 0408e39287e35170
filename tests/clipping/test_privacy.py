"""What is private about it: sensitivity, noise and epsilon are those of the stated mechanism."""

import math

import pytest
import torch
from documents import PRIVATE_TRAINING, find_code
from opacus.accountants import PRVAccountant, RDPAccountant
from opacus.data_loader import DPDataLoader
from opacus.optimizers.optimizer import _generate_noise
from opacus.utils.batch_memory_manager import BatchMemoryManager
from small_models import (
    EVERY,
    Secure,
    Small,
    V,
    build,
    default_dtype,
    gradients,
    private,
    sums_of,
    take_step,
)
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from dpprof.private import BookKeeping, FlashClipping
from dpprof.private.noise.noise import NoiseOfStep
from dpprof.private.noise.noise_keys import StepKey

C, SIGMA = 0.7, 2.5


def sample_losses(model: nn.Module, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    logits = model(ids)
    losses = functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    return losses.view(labels.shape).mean(1)


def data(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(*(torch.randint(V, (samples, 5), generator=generator) for _ in range(2)))


def make_private(way, model: nn.Module, **options) -> tuple:
    clipping = way(model, C)
    options = {"noise_multiplier": SIGMA, "expected_batch_size": 4} | options
    return clipping, private(clipping, model, **options)


@pytest.mark.parametrize("way", EVERY)
@pytest.mark.parametrize("samples", [0, 6])
def test_noise_is_gaussian_of_the_stated_scale_whatever_the_batch(way, samples) -> None:
    model = build("linear")
    clipping, optimizer = make_private(way, model, generator=torch.Generator().manual_seed(5))
    ids, labels = data(max(samples, 1)).tensors
    drawn = []
    before = nn.utils.parameters_to_vector(model.parameters()).detach()
    for _ in range(40):
        nn.utils.vector_to_parameters(before.clone(), model.parameters())
        clipping.backward(sample_losses(model, ids, labels) if samples else torch.zeros(0))
        clean = sums_of(clipping)
        optimizer.step()
        optimizer.zero_grad()
        after = nn.utils.parameters_to_vector(model.parameters()).detach()
        drawn.append(-4 * (after - before) - clean)  # learning rate 1, expected batch size 4
    noise = torch.stack(drawn) / (SIGMA * C)

    n = noise.numel()
    assert n > 200_000
    assert abs(float(noise.mean())) < 5 / math.sqrt(n)
    assert float(noise.var()) == pytest.approx(1, abs=5 * math.sqrt(2 / n))
    assert float(noise.pow(4).mean()) == pytest.approx(3, abs=5 * math.sqrt(96 / n))
    # Between coordinates, and between steps, nothing is shared.
    neighbours = (noise[:, 1:] * noise[:, :-1]).mean()
    assert abs(float(neighbours)) < 5 / math.sqrt(n)


def draw_noise(generator: torch.Generator | None = None) -> torch.Tensor:
    model = build("linear")
    clipping, optimizer = make_private(BookKeeping, model, generator=generator)
    torch.manual_seed(3)
    before = torch.get_rng_state()
    clipping.backward(torch.zeros(0))
    optimizer.step()
    assert torch.equal(torch.get_rng_state(), before)
    return gradients(model)


def test_noise_follows_a_generator_that_is_given_and_never_the_global_seed() -> None:
    assert not (draw_noise() == draw_noise()).any()
    first, again = (draw_noise(torch.Generator().manual_seed(5)) for _ in range(2))
    assert torch.equal(first, again)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("is_secure", [False, True])
def test_a_gradient_is_the_sum_with_opacus_noise_over_the_batch_size_expected(
    is_secure, reduction
) -> None:
    model, kind = build("linear"), Secure if is_secure else torch.Generator
    clipping, optimizer = make_private(
        BookKeeping,
        model,
        generator=kind().manual_seed(5),
        secure_mode=is_secure,
        loss_reduction=reduction,
    )
    clipping.backward(sample_losses(model, *data(3).tensors))
    sums = [clipping.sums.part[p].clone() for p in model.parameters()]
    again = torch.Generator().manual_seed(5)
    with default_dtype(torch.float64):  # in which Opacus draws secure noise
        noise = [_generate_noise(SIGMA * C, one, again, secure_mode=is_secure) for one in sums]

    optimizer.accumulate()
    optimizer.add_noise()

    for p, summed, drawn in zip(model.parameters(), sums, noise, strict=True):
        expected = (summed + drawn) / (4 if reduction == "mean" else 1)
        torch.testing.assert_close(p.grad, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_noise_is_added_before_anything_is_rounded_to_16_bits(dtype) -> None:
    """Noise below the smallest number of 16 bits still decides how a sum is rounded."""
    _, optimizer = make_private(BookKeeping, build("linear"))
    step = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    optimizer.expected_batch_size = size = 2**16
    optimizer.noise_multiplier = size * step / 8 / C
    summed = torch.full((10_000,), size * step / 2, dtype=dtype)  # half a step, once divided

    key = StepKey(b"", generator=torch.Generator().manual_seed(4))
    NoiseOfStep(optimizer._std, optimizer._divisor, key).add_to(summed)

    up = (summed > 0).double().mean()
    assert set(summed.tolist()) == {0.0, step}
    assert float(up) == pytest.approx(0.5, abs=5 * 0.5 / math.sqrt(10_000))


@pytest.mark.parametrize("accountant_type", [RDPAccountant, PRVAccountant])
def test_epsilon_is_opacus_for_the_same_schedule(accountant_type) -> None:
    loader = DPDataLoader.from_data_loader(DataLoader(data(40), batch_size=4))
    model = build("linear")
    _, optimizer = make_private(BookKeeping, model)
    accountant = accountant_type()
    optimizer.attach_step_hook(accountant.get_optimizer_hook_fn(loader.sample_rate))
    torch.manual_seed(3)
    sizes = []
    for _ in range(3):
        for ids, labels in loader:
            sizes.append(len(ids))
            take_step(optimizer, sample_losses(model, ids.long(), labels.long()))

    expected = accountant_type()
    expected.history = [(SIGMA, loader.sample_rate, len(sizes))]
    assert accountant.history == expected.history
    assert accountant.get_epsilon(delta=1e-5) == expected.get_epsilon(delta=1e-5) > 0
    assert len(set(sizes)) > 3  # Poisson: batches differ
    assert loader.sample_rate == 0.1


def in_order(sampler):
    """Have a Poisson sampler draw two batches of six, in order."""
    batches = [list(range(6)), list(range(6, 12))]
    sampler.__class__ = type("InOrder", (type(sampler),), {"__iter__": lambda _: iter(batches)})


def test_opacus_batch_memory_manager_splits_a_batch_into_parts() -> None:
    loader = DataLoader(data(12), batch_size=6)
    whole, parts = build("linear"), build("linear")
    (_, optimizer), (_, in_parts) = (
        make_private(FlashClipping, model, generator=torch.Generator().manual_seed(1))
        for model in (whole, parts)
    )
    for ids, labels in loader:
        take_step(optimizer, sample_losses(whole, ids, labels))
    hooked = []
    in_parts.attach_step_hook(hooked.append)
    poisson = DPDataLoader.from_data_loader(loader)
    in_order(poisson.batch_sampler)
    with BatchMemoryManager(
        data_loader=poisson, max_physical_batch_size=2, optimizer=in_parts
    ) as physical:
        for ids, labels in physical:
            assert len(ids) <= 2
            take_step(in_parts, sample_losses(parts, ids, labels))

    assert len(hooked) == 2
    assert in_parts.accumulated_iterations == 1
    for one, other in zip(whole.parameters(), parts.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)


class FailsOnNothing(Small):
    """As Hugging Face's models do."""

    def forward(self, ids):
        return super().forward(ids.view(len(ids), -1))  # cannot reshape a tensor of 0 elements


@pytest.mark.parametrize("samples", [40, 6])
def test_the_loop_in_the_documents_trains_on_empty_batches_too(samples) -> None:
    loop = find_code(PRIVATE_TRAINING, "NoisyOptimizer")
    torch.manual_seed(0)
    model = FailsOnNothing("layer norm", 6, 9, bias=True)
    before = [p.detach().clone() for p in model.parameters()]
    loader = DataLoader(data(samples), batch_size=2 if samples == 6 else 4)
    names = {"model": model, "data_loader": loader}

    exec(loop, names)  # noqa: S102

    (steps,) = (count for _, _, count in names["accountant"].history)
    assert steps == len(names["data_loader"])
    assert names["accountant"].get_epsilon(delta=1e-5) > 0
    for old, new in zip(before, model.parameters(), strict=True):
        assert not torch.equal(old, new)
