"""The reference itself, against ordinary autograd and numbers by hand."""

import pytest
import torch
from factory import make_experiment
from torch import nn

from dpprof.measure.verification.reference import (
    PlacedGroup,
    clip_and_average,
    group_norms,
    sample_gradients,
)
from dpprof.subjects.models.build import build_model

SAMPLES = [torch.tensor([[3.0], [0.3]]), torch.tensor([[4.0, 0.0], [0.0, 0.4]])]


def test_norms_by_hand() -> None:
    whole, apart = [PlacedGroup([0, 1], 1.0)], [PlacedGroup([1], 1.0), PlacedGroup([0], 1.0)]

    assert group_norms(SAMPLES, whole).flatten().tolist() == pytest.approx([5.0, 0.5])
    assert group_norms(SAMPLES, apart).flatten().tolist() == pytest.approx([4.0, 3.0, 0.4, 0.3])


def test_clipped_as_one_by_hand() -> None:
    found = clip_and_average(SAMPLES, [PlacedGroup([0, 1], 1.0)])

    # The first sample is scaled to a norm of 1, the second is within it.
    assert found.tolist() == pytest.approx([0.45, 0.4, 0.2], rel=1e-5)


def test_clipped_in_groups_by_hand() -> None:
    found = clip_and_average(SAMPLES, [PlacedGroup([0], 0.6), PlacedGroup([1], 0.2)])

    assert found.tolist() == pytest.approx([0.45, 0.1, 0.1], rel=1e-5)


def test_without_groups_it_is_the_mean() -> None:
    assert clip_and_average(SAMPLES, []).tolist() == pytest.approx([1.65, 2.0, 0.2])


class Branches(nn.Module):
    """What vmap cannot follow: it looks at a value."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(5, 5)
        self.frozen = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(self, tokens_BT):
        sign = 1 if int(tokens_BT.sum()) % 2 else -1
        return self.table(tokens_BT) * sign * self.frozen


@pytest.mark.parametrize("name", ["sdpa", "eager", "opacus", "branches"])
def test_samples_gradients_are_those_of_autograd(name) -> None:
    torch.manual_seed(0)
    model = Branches() if name == "branches" else build_model(make_experiment(attention=name))
    model = model.double()
    tokens, labels = torch.randint(5, (2, 3, 4))
    trainable = [p for p in model.parameters() if p.requires_grad]
    samples = sample_gradients(model, [tokens], labels)

    assert len(samples) == len(trainable)
    for row in range(3):
        loss = nn.functional.cross_entropy(model(tokens[row : row + 1])[0], labels[row])
        for found, expected in zip(samples, torch.autograd.grad(loss, trainable), strict=True):
            torch.testing.assert_close(found[row], expected.flatten(), rtol=1e-9, atol=1e-13)
