"""The bound moves as Opacus says, the step clips to it, and noise pays for the count."""

import math
import warnings

import pytest
import torch
from opacus.utils.adaptive_clipping import (
    DPLossFastGradientAdaptiveClipping,
    PrivacyEngineAdaptiveClipping,
)
from steps import flat_gradient, norms_of, prepare, sample_gradients
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from dpprof.private.errors import UnsupportedError

METHOD = "opacus-adaptive"
B = 16
FIELDS = {"batch_size": B, "dtype": "float64", "noise_multiplier": 0}


def norms() -> Tensor:
    return norms_of(sample_gradients(**FIELDS))


def step_from(bound: float, seed: int = 1, **fields) -> tuple[Tensor, float]:
    """The gradient of a step that begins with a bound, and the bound that it clipped to."""
    step, batch = prepare(METHOD, **FIELDS | {"max_grad_norm": bound} | fields)
    torch.manual_seed(seed)
    step.compute_gradient(batch, lambda _: None)
    return flat_gradient(step.module), step.optimizer.max_grad_norm


def test_samples_are_clipped_to_the_bound_that_the_step_found() -> None:
    start = float(norms().median())
    found, bound = step_from(start)
    factors = (bound / norms()).clamp(max=1)
    flat = torch.cat(sample_gradients(**FIELDS), dim=1)

    assert bound != start
    assert 0 < (factors < 1).sum() < B
    torch.testing.assert_close(found, factors @ flat / B, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("quantile", "seed"), [(0.0, 1), (0.5, 2), (1.0, 3)])
def test_the_bound_moves_by_the_noisy_share_of_samples_within_it(quantile, seed) -> None:
    start = float(norms().quantile(quantile)) * 1.0001
    torch.manual_seed(seed)
    noise = float(torch.normal(0.0, B / 20, (1,)))
    share = (int((norms() <= start).sum()) + noise) / B

    assert start > 1.3
    _, bound = step_from(start, seed)
    assert bound == pytest.approx(start * math.exp(-0.2 * (share - 0.5)), rel=1e-6)


def test_the_noise_is_a_multiple_of_the_bound_that_it_clipped_to() -> None:
    step, batch = prepare(METHOD, **FIELDS | {"max_grad_norm": 2.0})
    step.compute_gradient(batch, lambda _: None)
    (group,) = step.clip_groups()

    assert step.noise_bound() == group.bound == step.optimizer.max_grad_norm != 2.0


def test_the_bound_never_falls_below_one() -> None:
    assert step_from(1e-3)[1] == 1.0


def test_noise_has_the_larger_standard_deviation_that_is_documented() -> None:
    sigma = 1.2
    large = {"model": {"vocab_size": 200, "d_model": 32, "layers": 1, "heads": 2}}
    clipped, bound = step_from(2.0, **large)
    noised, same_bound = step_from(2.0, noise_multiplier=sigma, **large)
    std = bound * (sigma**-2 - (B / 10) ** -2) ** -0.5 / B

    assert bound == same_bound
    assert std > 1.5 * bound * sigma / B
    # From about 26,000 values: one standard error is 0.4 %.
    assert (noised - clipped).std().item() == pytest.approx(std, rel=0.03)


class LossOfSamples:
    """A criterion that does not reduce over samples, though it says what Opacus asks for."""

    reduction = "mean"

    def __call__(self, logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
        losses_BT = functional.cross_entropy(logits_BTV.mT, labels_BT, reduction="none")
        return losses_BT.mean(dim=1)


def test_steps_are_those_of_opacus_privacy_engine() -> None:
    fields = FIELDS | {"max_grad_norm": 2.0, "noise_multiplier": 1.0}
    apart, batch = prepare(METHOD, **fields)
    plain, _ = prepare("standard", **fields)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that its random numbers are not for secrets
        module, optimizer, criterion, _ = PrivacyEngineAdaptiveClipping().make_private(
            module=plain.module.train(),
            optimizer=plain.optimizer,
            criterion=LossOfSamples(),
            data_loader=DataLoader(TensorDataset(*batch), batch_size=B),
            noise_multiplier=1.0,
            max_grad_norm=2.0,
            poisson_sampling=False,
            grad_sample_mode="ghost",
        )

    torch.manual_seed(1)
    for _ in range(3):
        apart.run(batch, lambda _: None)
    torch.manual_seed(1)
    for _ in range(3):
        criterion(module(batch.x), batch.labels).backward()
        optimizer.step()
        optimizer.zero_grad()

    assert apart.optimizer.max_grad_norm == optimizer.max_grad_norm != 2.0
    for one, other in zip(apart.module.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_opacus_own_criterion_still_reduces_over_samples() -> None:
    """Where this fails, Opacus was mended, and ``_AdaptiveCriterion`` can go."""
    step, batch = prepare(METHOD, **FIELDS)
    criterion = DPLossFastGradientAdaptiveClipping(
        step.module, step.optimizer, nn.CrossEntropyLoss()
    )
    logits_BTV = step.module(batch.x)

    assert criterion(logits_BTV.mT, batch.labels).loss_per_sample.shape == ()


@pytest.mark.parametrize("batch_size", [1, 10])
def test_a_batch_too_small_to_pay_for_the_count_is_refused(batch_size) -> None:
    with pytest.raises(UnsupportedError, match=r"more than 10 x noise_multiplier = 10 "):
        step_from(1.0, batch_size=batch_size, noise_multiplier=1.0)
