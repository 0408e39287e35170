"""Layers without a rule run as they did before, or are refused."""

import pytest
import torch
from small_models import assert_exact
from torch import nn

from dpprof.private.engine.book_keeping import BookKeeping
from dpprof.private.errors import UnsupportedError


class Dropping(nn.Module):
    """A layer without a rule that behaves otherwise in training."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x, *, shift=0.0, by=None):
        y = x * self.weight + shift + (0 if by is None else by)
        return nn.functional.dropout(y, 0.5, self.training)


@pytest.mark.parametrize("made_in", ["train", "eval"])
def test_a_layer_without_a_rule_trains_and_evaluates_as_it_is_told(made_in) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Dropping(8)).train(made_in == "train")
    x = torch.randn(3, 5, 8)
    clipping = BookKeeping(model, 1.0)

    model.eval()
    assert torch.equal(model(x), model(x))
    clipping.backward(model(x).sum((1, 2)))
    model.train()
    assert not torch.equal(model(x), model(x))
    model.zero_grad()
    with pytest.raises(UnsupportedError, match="Dropping has no rule and draws random numbers"):
        clipping.backward(model(x).sum((1, 2)))


def test_a_layer_without_a_rule_takes_keywords() -> None:
    torch.manual_seed(0)
    layer = Dropping(4).eval()
    x, by = torch.randn(3, 5, 4), torch.randn(3, 5, 4)
    losses_of = lambda x, by: layer(x, shift=1.5, by=by).square().sum((1, 2))  # noqa: E731
    assert_exact(BookKeeping, layer, (x, by), losses_of, tolerance=1e-6)


@pytest.mark.parametrize("tokens", [5, 3])  # as many as samples, too
def test_a_layer_without_a_rule_takes_what_is_alike_for_all_samples(tokens) -> None:
    torch.manual_seed(0)
    layer = Dropping(4).eval()
    x, by = torch.randn(3, tokens, 4), torch.randn(tokens, 4)
    losses_of = lambda x: layer(x, by=by).square().sum((1, 2))  # noqa: E731
    assert_exact(BookKeeping, layer, (x,), losses_of, tolerance=1e-6)
