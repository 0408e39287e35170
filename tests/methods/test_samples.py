"""A sample's loss is its own, and a sample that is not finite or not there adds nothing."""

import math

import pytest
import torch
from steps import flat_gradient, prepare

from dpprof.private.layers.sample_losses import UNLABELLED, sample_losses
from dpprof.subjects.methods.training_step import Batch, mean_loss

LOGITS = torch.tensor([[[0.0, 0.0], [math.log(3.0), 0.0]]] * 3)
"""Of two ids; the first token's loss is log 2 for both, the second's log 4/3 or log 4."""

LABELS = torch.tensor([[0, 1], [UNLABELLED, 1], [UNLABELLED, UNLABELLED]])


def test_losses_by_hand() -> None:
    expected = [(math.log(2) + math.log(4)) / 2, math.log(4), 0.0]

    assert sample_losses(LOGITS, LABELS).tolist() == pytest.approx(expected)
    assert mean_loss(LOGITS, LABELS).item() == pytest.approx(sum(expected) / 3)


def test_a_sample_without_labels_has_a_gradient_of_zero() -> None:
    logits = LOGITS.clone().requires_grad_()
    sample_losses(logits, LABELS).sum().backward()

    assert logits.grad[2].tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert logits.grad[1, 1].tolist() == pytest.approx([0.75, -0.75])


SETTINGS = {"batch_size": 3, "seq_len": 4, "dtype": "float64", "max_grad_norm": 0.5}
POISONED = 15


def gradient_of(batch, noise, **poison):
    step, _ = prepare("microbatch", **SETTINGS, noise_multiplier=noise)
    with torch.no_grad():
        step.module.token_embedding.weight[POISONED] = poison.get("value", 0.0)
    step.compute_gradient(batch, lambda _: None)
    return flat_gradient(step.module)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_sample_that_is_not_finite_adds_nothing(value) -> None:
    tokens = torch.arange(12).reshape(3, 4)
    labels = tokens + 1
    others = Batch(tokens[1:], labels[1:])
    tokens = tokens.clone()
    tokens[0, 0] = POISONED
    found = gradient_of(Batch(tokens, labels), 0.0, value=value)

    assert found.norm() > 0
    torch.testing.assert_close(found, gradient_of(others, 0.0, value=value), rtol=0, atol=0)


def test_a_batch_without_samples_leaves_noise_alone() -> None:
    nothing = Batch(*torch.empty(2, 0, 4, dtype=torch.int64))

    assert gradient_of(nothing, 0.0).count_nonzero() == 0
    # 1,176 values: one standard error is 2 %.
    assert gradient_of(nothing, 2.0).std().item() == pytest.approx(2.0 * 0.5 / 3, rel=0.1)


@pytest.mark.parametrize("method", ["flash", "flash-bk", "per-layer"])
def test_samples_that_were_left_out_are_told(method) -> None:
    step, batch = prepare(method, batch_size=4)
    assert step.nonfinite_samples == 0
    batch.x[0] = 1
    batch.x[1:] = 2
    with torch.no_grad():
        step.module.token_embedding.weight[1] = math.nan
    for count in (1, 2):
        step.run(batch, lambda _: None)

        assert step.nonfinite_samples == count
    assert all(p[2:].isfinite().all() for p in step.module.parameters())
