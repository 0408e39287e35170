"""A layer without a rule runs again on each sample; tables may be as long as the batch."""

import pytest
import torch
from small_models import gradients, one_by_one
from torch import nn

from dpprof.private import BookKeeping, FlashClipping, UnsupportedError

K, D = 6, 4


class Scores(nn.Module):
    """One number for each sample, of a table (K, d) that is alike for all."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(D, D))

    def forward(self, x, table):
        return (x @ self.w @ table.T).logsumexp(1)


class Gated(nn.Module):
    """A branch with a table, which a gate has not opened."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.w = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.randn(D, D))

    def forward(self, x, table):
        return (x + self.gate.tanh() * ((x @ self.w @ table.T).softmax(1) @ table)).square().sum(1)


class FirstOfTwo(Scores):
    def forward(self, x, table):
        return torch.stack([super().forward(x, table), x[:, 0]], 1)


class WithTable(nn.Module):
    def __init__(self, layer) -> None:
        super().__init__()
        self.layer = layer
        self.register_buffer("table", torch.randn(K, D))

    def forward(self, x):
        return self.layer(x, self.table)


def build(kind) -> WithTable:
    torch.manual_seed(0)
    return WithTable(kind())


def losses_of(model, x):
    return model(x).reshape(len(x), -1).sum(1)


@pytest.mark.parametrize("clipping", [BookKeeping, FlashClipping])
@pytest.mark.parametrize("kind", [Scores, FirstOfTwo, Gated])
def test_a_table_as_long_as_the_batch_is_not_cut(kind, clipping) -> None:
    model = build(kind)
    batch = torch.randn(K + 1, D)
    own = clipping(model, 1.0)
    own.backward(losses_of(model, batch[: K - 1]))  # shows which tensor has entries of samples
    for count in (K - 1, K, K + 1):
        model.zero_grad()
        own.backward(losses_of(model, batch[:count]))
        found = gradients(model)
        model.zero_grad()
        with own.disabled():
            _, expected, _ = one_by_one(
                lambda x: losses_of(model, x).sum(), model, [batch[:count]], bound=1.0
            )
        assert (found - expected).norm() <= 1e-5 * expected.norm()


def test_what_lengths_leave_open_is_refused_where_gradients_differ() -> None:
    model = build(Gated)
    clipping = BookKeeping(model, 1.0)
    with pytest.raises(UnsupportedError, match=r"lengths do not tell which of these tensors have"):
        clipping.backward(losses_of(model, torch.randn(K, D)))


class Centred(nn.Module):
    """Mixes samples in its one output."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(D))

    def forward(self, x):
        y = x @ self.w
        return y - y.mean().detach()


def test_mixing_in_a_layer_of_one_output_is_refused() -> None:
    torch.manual_seed(0)
    model = Centred()
    clipping = BookKeeping(model, 1.0, first_batch="trusted")
    with pytest.raises(RuntimeError, match="gave another output when it ran again"):
        clipping.backward(model(torch.randn(5, D)))
