"""Layers whose first axis has several entries of each sample: exact where the graph proves it.

Shape legend: B samples, T tokens, D width.
"""

import pytest
import torch
import transformers
from small_models import FLAT, assert_exact, is_clear
from torch import nn

from dpprof.measure.verification.float32_islands import lift_float32
from dpprof.private.contributions.sample_norms import BatchAxisError
from dpprof.private.errors import UnsupportedError

B, T, D = 3, 4, 6


class Inside(nn.Module):
    """A layer between two others, which sees the samples in another shape."""

    def __init__(self, run, layer=None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, D)
        self.inside = nn.Linear(D, D) if layer is None else layer()
        self.bias = nn.Parameter(torch.randn(2, D))
        self.run = run
        self.double()

    def forward(self, x):
        y = self.first(x).tanh()
        y = self.run(self, y) if self.run.__code__.co_argcount > 1 else self.inside(y)
        return self.last(y.tanh())

    def losses(self, x):
        return self(x).square().sum((1, 2))


def joined(m, x):
    return m.inside(x.reshape(-1, D)).view(x.shape)


def in_windows(m, x):
    """Cut tokens and halves of the width into windows of two tokens, as Swin cuts images."""
    windows = x.view(len(x), -1, 2, 2, D // 2).permute(0, 1, 3, 2, 4).reshape(-1, 2, D // 2)
    found = m.inside(torch.cat([windows, windows], 2).tanh()) + m.bias
    halves = found[..., : D // 2].reshape(len(x), -1, 2, 2, D // 2).permute(0, 1, 3, 2, 4)
    return halves.reshape(x.shape)


def around(m, x):
    """Join, run a frozen product, a softmax and a residual, and split again."""
    tokens = x.flatten(0, 1)
    hidden = m.inside((tokens @ torch.eye(D, dtype=x.dtype)).softmax(1)) * 2
    return torch.split(m.inside(hidden + tokens), 3, 1)[0].repeat(1, 2).view(x.shape)


FORMS = {
    "joined": joined,
    "in windows": in_windows,
    "used twice": around,
    "split further": lambda m, x: m.inside(x.view(-1, 2, D // 2).repeat(1, 1, 2))[..., :3].reshape(
        x.shape
    ),
    "before any other layer": lambda m, x: joined(m, x.detach()),
}
LAYERS = {
    "linear": None,
    "norm": lambda: nn.LayerNorm(D),
    "no rule": nn.PReLU,
}


@pytest.mark.parametrize("way", FLAT)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("samples", [B, T])
@pytest.mark.parametrize("form", FORMS)
def test_what_keeps_samples_first_is_exact(form, samples, layer, way) -> None:
    model = Inside(FORMS[form], LAYERS[layer])
    if "bias" not in FORMS[form].__code__.co_names:
        del model.bias
    x = torch.randn(samples, T, D, dtype=torch.float64)

    assert_exact(way, model, (x,), bound=0.5)


def test_ids_of_all_samples_in_one_axis_are_exact() -> None:
    table, last = nn.Embedding(9, D).double(), nn.Linear(D, D).double()
    model = nn.ModuleList([table, last])
    ids = torch.randint(9, (B, T))

    def losses_of(ids):
        return last(table(ids.flatten()).view(*ids.shape, D)).square().sum((1, 2))

    for way in FLAT:
        assert_exact(way, model, (ids,), losses_of, bound=0.5).remove()
        model.zero_grad()


def by_tokens(m, x):
    """Put the tokens of all samples one after the other."""
    return m.inside(x.transpose(0, 1).reshape(-1, D)).view(-1, len(x), D).transpose(0, 1)


@pytest.mark.parametrize("way", FLAT)
@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("samples", [B, T, 2])
def test_rows_of_all_samples_token_by_token_are_exact(samples, layer, way) -> None:
    model = Inside(by_tokens, LAYERS[layer])
    del model.bias
    x = torch.randn(samples, T, D, dtype=torch.float64)

    assert_exact(way, model, (x,), bound=0.5)


def gathered(m, x):
    """Gather as many tokens as there are, as for an expert."""
    order = torch.arange(x.shape[0] * x.shape[1]).flip(0)
    return m.inside(x.reshape(-1, D)[order])[order].view(x.shape)


LEAF = torch.randn(4, T * D, dtype=torch.float64, requires_grad=True)


def beside_a_leaf(m, x):
    """Gather tokens, and add what has as many rows, from a leaf with a row for each sample."""
    order = torch.arange(len(x) * x.shape[1]).flip(0)
    return (m.inside(x.reshape(-1, D)[order]) + LEAF.view(-1, D))[order].view(x.shape)


@pytest.mark.parametrize("way", FLAT)
@pytest.mark.parametrize(
    ("run", "samples"),
    [(gathered, B), (gathered, T), (gathered, 2), (beside_a_leaf, 4)],
)
def test_another_order_is_refused_whatever_its_length(run, samples, way) -> None:
    model = Inside(run)
    del model.bias
    clipping = way(model, 0.5)
    x = torch.randn(samples, T, D, dtype=torch.float64)

    with pytest.raises((BatchAxisError, UnsupportedError), match=r"inside.* saw"):
        clipping.backward(model.losses(x))
    assert is_clear(model)


def test_samples_that_are_mixed_in_such_a_shape_are_refused() -> None:
    model = Inside(lambda m, x: m.inside(x.reshape(-1, D).roll(1, 0).contiguous()).view(x.shape))
    del model.bias
    x = torch.randn(B, T, D, dtype=torch.float64)
    mixed = FLAT[1](model, 0.5)

    with pytest.raises(UnsupportedError, match="the loss of a sample depends on"):
        mixed.backward(model.losses(x))


@pytest.mark.parametrize("way", FLAT)
def test_swin_is_exact(way) -> None:
    """Its windows are on the first axis, where biases enter too."""
    config = transformers.SwinConfig(
        image_size=32,
        patch_size=4,
        embed_dim=8,
        depths=[2],
        num_heads=[2],
        window_size=4,
        drop_path_rate=0.0,
    )
    with lift_float32():
        model = transformers.SwinForImageClassification(config).double()
        images = torch.randn(B, 3, 32, 32)
        losses_of = lambda images: model(images).logits.square().sum(1)  # noqa: E731
        assert_exact(way, model, (images,), losses_of, bound=0.1, tolerance=1e-8)


class InChunks(nn.Module):
    """Cuts long inputs into chunks, and puts chunks before samples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.middle, self.last = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def losses(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x).tanh()
        B, T, d = y.shape
        n = max(1, T // 4)
        if n > 1:
            y = y.view(B, n, T // n, d).transpose(0, 1).reshape(n * B, T // n, d)
        y = self.middle(y)
        if n > 1:
            y = y.view(n, B, T // n, d).transpose(0, 1).reshape(B, T, d)
        return self.last(y.tanh()).square().sum((1, 2))


@pytest.mark.parametrize("way", FLAT)
@pytest.mark.parametrize("samples", [2, 3])
def test_chunks_before_samples_are_exact_whatever_their_length(samples, way) -> None:
    """Of 2 samples there are as many chunks as samples."""
    model = InChunks().double()
    clipping = assert_exact(way, model, (torch.randn(samples, 3, 3).double(),), bound=1.0)
    clipping.remove()
    model.zero_grad()

    assert_exact(way, model, (torch.randn(samples, 8, 3).double(),), bound=1.0)


class Sometimes(nn.Module):
    """Mixes rows of samples in long inputs alone, by an operator of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 4)

    def losses(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x.flatten(0, 1)).view(*x.shape[:2], 4)
        y = y if x.shape[1] < 4 else Rolled.apply(y)
        return self.last(y.tanh().flatten(0, 1)).square().sum(1).view(len(x), -1).sum(1)


class Rolled(torch.autograd.Function):
    """Gives each sample another's, unknown to anybody."""

    @staticmethod
    def forward(ctx, x):  # noqa: ARG004
        return x.roll(1, 0)

    @staticmethod
    def backward(ctx, g):  # noqa: ARG004
        return g.roll(-1, 0)


@pytest.mark.parametrize("way", FLAT)
def test_another_graph_is_verified_again(way) -> None:
    model = Sometimes()
    clipping = way(model, 1.0)
    for _ in range(2):
        clipping.backward(model.losses(torch.randn(3, 3, 3)))
        model.zero_grad()
    assert clipping.first_batch_verified

    with pytest.raises(UnsupportedError, match="loss of a sample depends on what first"):
        clipping.backward(model.losses(torch.randn(3, 8, 3)))


class TokensFirst(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(3, 6), nn.Linear(6, 6)

    def losses(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x).tanh().transpose(0, 1)).tanh().square().sum((0, 2))


@pytest.mark.parametrize("way", FLAT)
def test_a_batch_that_was_refused_verifies_nothing(way) -> None:
    model = TokensFirst()
    clipping = way(model, 1.0)
    with pytest.raises(UnsupportedError, match="saw 3 samples, and there are 4 losses"):
        clipping.backward(model.losses(torch.randn(4, 3, 3)))
    assert not clipping.first_batch_verified
    with pytest.raises(UnsupportedError, match="last"):
        clipping.backward(model.losses(torch.randn(4, 4, 3)))
