"""A sample's loss is the mean over its labelled tokens, whatever the other samples have."""

import math

import pytest
import torch

from dpprof.methods.training_step import UNLABELLED, mean_loss, sample_losses

LOGITS = torch.tensor([[[0.0, 0.0], [math.log(3.0), 0.0]]] * 3)
"""Of two ids; the first token's loss is log 2 for both, the second's log 4/3 or log 4."""

LABELS = torch.tensor([[0, 1], [UNLABELLED, 1], [UNLABELLED, UNLABELLED]])


def test_by_hand() -> None:
    expected = [(math.log(2) + math.log(4)) / 2, math.log(4), 0.0]

    assert sample_losses(LOGITS, LABELS).tolist() == pytest.approx(expected)
    assert mean_loss(LOGITS, LABELS).item() == pytest.approx(sum(expected) / 3)


def test_a_sample_without_labels_has_a_gradient_of_zero() -> None:
    logits = LOGITS.clone().requires_grad_()
    sample_losses(logits, LABELS).sum().backward()

    assert logits.grad[2].tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert logits.grad[1, 1].tolist() == pytest.approx([0.75, -0.75])
