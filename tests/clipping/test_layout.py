"""Layers whose first axis has several entries of each sample: exact where the graph proves it."""

from functools import partial

import pytest
import torch
import transformers
from small_models import Composed, assert_exact, is_clear, squares
from torch import nn

from dpprof.measure.verification.float32_islands import lift_float32
from dpprof.private import BookKeeping, UnsupportedError
from dpprof.private.errors import BatchAxisError

B, T, D = 3, 4, 6


def build(run, layer=None, **parts):
    """A layer between two others, which sees the samples in another shape."""
    layers = {"first": nn.Linear(D, D), "last": nn.Linear(D, D)}
    layers["inside"] = nn.Linear(D, D) if layer is None else layer()
    return Composed(
        lambda m, x: m.last(run(m, m.first(x).tanh()).tanh()), **layers, **parts
    ).double()


def draw(samples=B):
    return torch.randn(samples, T, D, dtype=torch.float64)


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


LAYERS = {"linear": None, "norm": lambda: nn.LayerNorm(D), "no rule": nn.PReLU}


def assert_samples_exact(way, model, x, **options):
    return assert_exact(way, model, (x,), partial(squares, model), **{"bound": 0.5} | options)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("samples", [B, T])
@pytest.mark.parametrize("form", FORMS)
def test_what_keeps_samples_first_is_exact(form, samples, layer, way) -> None:
    parts = {"bias": torch.randn(2, D)} if form == "in windows" else {}
    assert_samples_exact(way, build(FORMS[form], LAYERS[layer], **parts), draw(samples))


def test_ids_of_all_samples_in_one_axis_are_exact(way) -> None:
    model = Composed(
        lambda m, ids: m.last(m.table(ids.flatten()).view(*ids.shape, D)),
        table=nn.Embedding(9, D),
        last=nn.Linear(D, D),
    ).double()
    assert_samples_exact(way, model, torch.randint(9, (B, T)))


def by_tokens(m, x):
    """Put the tokens of all samples one after the other."""
    return m.inside(x.transpose(0, 1).reshape(-1, D)).view(-1, len(x), D).transpose(0, 1)


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("samples", [B, T, 2])
def test_rows_of_all_samples_token_by_token_are_exact(samples, layer, way) -> None:
    assert_samples_exact(way, build(by_tokens, LAYERS[layer]), draw(samples))


def gathered(m, x):
    """Gather as many tokens as there are, as for an expert."""
    order = torch.arange(x.shape[0] * x.shape[1]).flip(0)
    return m.inside(x.reshape(-1, D)[order])[order].view(x.shape)


LEAF = torch.randn(4, T * D, dtype=torch.float64, requires_grad=True)


def beside_a_leaf(m, x):
    """Gather tokens, and add what has as many rows, from a leaf with a row for each sample."""
    order = torch.arange(len(x) * x.shape[1]).flip(0)
    return (m.inside(x.reshape(-1, D)[order]) + LEAF.view(-1, D))[order].view(x.shape)


@pytest.mark.parametrize(
    ("run", "samples"), [*((gathered, samples) for samples in (B, T, 2)), (beside_a_leaf, 4)]
)
def test_another_order_is_refused_whatever_its_length(run, samples, way) -> None:
    model = build(run)
    with pytest.raises((BatchAxisError, UnsupportedError), match=r"inside.* saw"):
        way(model, 0.5).backward(squares(model, draw(samples)))
    assert is_clear(model)


def test_samples_that_are_mixed_in_such_a_shape_are_refused() -> None:
    model = build(lambda m, x: m.inside(x.reshape(-1, D).roll(1, 0).contiguous()).view(x.shape))
    with pytest.raises(UnsupportedError, match="the loss of a sample depends on"):
        BookKeeping(model, 0.5).backward(squares(model, draw()))


def test_swin_is_exact(way) -> None:
    """Its windows are on the first axis, where biases enter too."""
    windows = {"image_size": 32, "patch_size": 4, "window_size": 4, "drop_path_rate": 0.0}
    config = transformers.SwinConfig(**windows, embed_dim=8, depths=[2], num_heads=[2])
    with lift_float32():
        model = transformers.SwinForImageClassification(config).double()
        images = torch.randn(B, 3, 32, 32)
        losses_of = lambda images: model(images).logits.square().sum(1)  # noqa: E731
        assert_exact(way, model, (images,), losses_of, bound=0.1, tolerance=1e-8)


def in_chunks(m, x):
    """Cut long inputs into chunks, and put chunks before samples."""
    y = m.first(x).tanh()
    B, T, d = y.shape
    n = max(1, T // 4)
    if n > 1:
        y = y.view(B, n, T // n, d).transpose(0, 1).reshape(n * B, T // n, d)
    y = m.middle(y)
    if n > 1:
        y = y.view(n, B, T // n, d).transpose(0, 1).reshape(B, T, d)
    return m.last(y.tanh())


@pytest.mark.parametrize("samples", [2, 3])
def test_chunks_before_samples_are_exact_whatever_their_length(samples, way) -> None:
    """Of 2 samples there are as many chunks as samples."""
    layers = {"first": nn.Linear(3, 4), "middle": nn.Linear(4, 4), "last": nn.Linear(4, 4)}
    model = Composed(in_chunks, **layers).double()
    for tokens in (3, 8):
        assert_samples_exact(way, model, torch.randn(samples, tokens, 3).double(), bound=1).remove()
        model.zero_grad()


def mix_sometimes(m, x):
    """Mix rows of samples in long inputs alone, by an operator of its own."""
    y = m.first(x.flatten(0, 1)).view(*x.shape[:2], 4)
    y = y if x.shape[1] < 4 else Rolled.apply(y)
    return m.last(y.tanh().flatten(0, 1)).view(*x.shape[:2], 4)


class Rolled(torch.autograd.Function):
    """Gives each sample another's, unknown to anybody."""

    @staticmethod
    def forward(ctx, x):  # noqa: ARG004
        return x.roll(1, 0)

    @staticmethod
    def backward(ctx, g):  # noqa: ARG004
        return g.roll(-1, 0)


def test_another_graph_is_verified_again(way) -> None:
    model = Composed(mix_sometimes, first=nn.Linear(3, 4), last=nn.Linear(4, 4))
    clipping = way(model, 1.0)
    for _ in range(2):
        clipping.backward(squares(model, torch.randn(3, 3, 3)))
        model.zero_grad()
    assert clipping.first_batch_verified

    with pytest.raises(UnsupportedError, match="loss of a sample depends on what first"):
        clipping.backward(squares(model, torch.randn(3, 8, 3)))
