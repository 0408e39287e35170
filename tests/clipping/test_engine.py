"""How clipping goes into an ordinary training loop, what it refuses, and what a copy has."""

import copy
import pickle

import pytest
import torch
from small_models import (
    EVERY,
    FLAT,
    Conv1D,
    Small,
    assert_exact,
    assert_exact_by_layer,
    batch,
    build,
    draw,
    each_of,
    gradients,
    is_clear,
)
from torch import nn
from torch.nn import functional
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from dpprof.private import BookKeeping, FlashClipping, PerLayerClipping, UnsupportedError

way = each_of(EVERY)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_and_sums_under_autocast_are_those_without(dtype, way) -> None:
    """One sample more moves a sum of thousands by the bound at most, however the loop is run."""
    model = nn.Sequential(nn.Linear(16, 8), nn.LayerNorm(8))
    clipping, sums = way(model, 1.0), []
    for samples in (4000, 4001):
        for around in (False, True):
            model.zero_grad()
            with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
                losses = model(torch.linspace(-1, 1, 16).expand(samples, 16)).square().sum(1)
            with torch.autocast("cpu", torch.bfloat16, enabled=around):
                clipping.backward(losses.float())
            sums.append(torch.cat([g.flatten() for g in gradients(model)]))
    assert torch.equal(sums[0], sums[1])
    assert torch.equal(sums[2], sums[3])
    assert float((sums[3] - sums[1]).norm()) < 1.01


@pytest.mark.parametrize("way", FLAT)
def test_nothing_is_kept_after_a_step(way) -> None:
    model = build("linear")
    clipping = way(model, 0.5)
    losses = model.losses(*batch())
    graph = losses.grad_fn
    clipping.backward(losses)

    kept = [name for name, value in vars(clipping).items() if isinstance(value, torch.Tensor)]
    assert kept == ["sample_norms"]
    assert not getattr(clipping, "_kept", None)
    with pytest.raises(RuntimeError, match="second time"):
        graph(torch.ones_like(losses))
    assert all(p.grad.grad_fn is None for p in model.parameters())


@pytest.mark.parametrize("way", FLAT)
def test_autocast_is_exact_to_bfloat16s_precision(way) -> None:
    model = build("linear").float()
    losses_of = torch.autocast("cpu", dtype=torch.bfloat16)(model.losses)
    assert_exact(way, model, draw(4, 7), losses_of, tolerance=0.02)

    assert model.head.weight.grad.dtype == torch.float32


def test_per_layer_clips_each_layer_by_itself() -> None:
    model = build("linear")
    clipping = assert_exact_by_layer(model, batch(), model.losses, bound=0.8)

    layers = [layer for layer in model.modules() if layer._parameters]
    assert clipping.sample_norms.shape == (4, len(layers))
    assert [bound for _, bound in clipping.groups] == [0.8 / len(layers) ** 0.5] * len(layers)


def test_per_layer_refuses_a_parameter_that_is_used_twice() -> None:
    model = build("tied", bias=False)
    with pytest.raises(UnsupportedError, match=r"embedding\.weight belongs to two layers"):
        PerLayerClipping(model, 1.0)
    assert not any("forward" in vars(layer) for layer in model.modules())
    model = build("used twice")
    clipping = PerLayerClipping(model, 1.0)
    with pytest.raises(RuntimeError, match="used more than once, and per-layer clipping"):
        clipping.backward(model.losses(*batch()))


def test_an_ordinary_backward_is_refused(way) -> None:
    model = build("linear")
    way(model, 1.0)

    with pytest.raises(RuntimeError, match=r"call backward\(losses\) of its Clipping"):
        model.losses(*batch()).sum().backward()


def test_losses_must_be_one_for_each_sample(way) -> None:
    model = build("linear")
    clipping = way(model, 1.0)

    with pytest.raises(ValueError, match=r"one for each sample.*shape \(\)"):
        clipping.backward(model.losses(*batch()).sum())
    with pytest.raises(ValueError, match=r"saw 4 samples, and there are 2 losses"):
        clipping.backward(model.losses(*batch()).flip(0).view(2, 2).sum(1))
    with pytest.raises(ValueError, match=r"float32 or float64, and are torch\.bfloat16"):
        clipping.backward(model.losses(*batch()).bfloat16())


class Past(Small):
    def forward(self, ids):
        return functional.linear(super().forward(ids) @ self.head.weight, self.head.weight)


class Hidden(Small):
    def forward(self, ids):
        x = self.embedding(ids)
        for _ in range(2):
            x = checkpoint(self.body, x, use_reentrant=True)
        return self.head(x)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Past, r"head\.weight was used outside of its layer"),
        (Hidden, "more than once, (which reentrant .* use_reentrant=False|and per-layer clipping)"),
    ],
)
def test_uses_that_clipping_does_not_see_are_refused_by_name(kind, message, way) -> None:
    model = kind("layer norm", 6, 9, bias=True)
    clipping = way(model, 1.0)
    with pytest.raises((ValueError, RuntimeError), match=message):
        clipping.backward(model.losses(*draw(4, 7)))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.BatchNorm1d(6, affine=False), "BatchNorm1d mixes samples"),
        (nn.BatchNorm1d(6).requires_grad_(False), "BatchNorm1d mixes samples"),
        (nn.Embedding(6, 6, sparse=True), "embedding with sparse"),
        (nn.Embedding(6, 6, scale_grad_by_freq=True), "embedding with scale_grad_by_freq"),
    ],
)
def test_layers_without_an_exact_gradient_are_refused(layer, message) -> None:
    model = nn.Sequential(nn.Linear(6, 6), layer)
    with pytest.raises(UnsupportedError, match=message):
        FlashClipping(model, 1.0)
    assert "forward" not in vars(model[0])


@pytest.mark.parametrize("way", FLAT)
def test_a_matrix_tied_to_its_own_transpose_is_exact(way) -> None:
    model = nn.Sequential(nn.Linear(6, 6, bias=False), nn.Tanh(), Conv1D(6, 6)).double()
    model[2].weight = model[0].weight
    x = torch.randn(3, 2, 6, dtype=torch.float64)
    assert_exact(way, model, (x,), lambda x: model(x).square().sum((1, 2)))


class Same(nn.Linear):
    pass


class Other(nn.Linear):
    def forward(self, x):
        return super().forward(x) * self.weight.sum()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [(Same, ["kept product", "sample gradients"]), (Other, ["sample gradients"] * 2)],
)
def test_a_subclass_has_its_bases_rule_unless_it_computes_something_else(kind, expected) -> None:
    model = nn.Sequential(kind(5, 3)).double()
    x = torch.randn(4, 2, 5, dtype=torch.float64)
    model(x).sum().backward()
    unclipped = gradients(model)
    model.zero_grad()
    clipping, ways = BookKeeping(model, 1e9), []

    def note(_layer, way, sampler, inputs):
        ways.append(way)
        return sampler(*inputs)

    clipping.watch = note
    clipping.backward(model(x).sum((1, 2)))
    torch.testing.assert_close(gradients(model), unclipped)
    assert ways == expected


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
    layer = Dropping(4).eval()
    losses_of = lambda x, by: layer(x, shift=1.5, by=by).square().sum((1, 2))  # noqa: E731
    batch = torch.randn(3, 5, 4), torch.randn(3, 5, 4)
    assert_exact(BookKeeping, layer, batch, losses_of, tolerance=1e-6)


@pytest.mark.parametrize("tokens", [5, 3])  # as many as samples, too
def test_a_layer_without_a_rule_takes_what_is_alike_for_all_samples(tokens) -> None:
    layer, by = Dropping(4).eval(), torch.randn(tokens, 4)
    losses_of = lambda x: layer(x, by=by).square().sum((1, 2))  # noqa: E731
    assert_exact(BookKeeping, layer, (torch.randn(3, tokens, 4),), losses_of, tolerance=1e-6)


@pytest.mark.parametrize("way", EVERY)
@pytest.mark.parametrize("make", ["deepcopy", "pickle", "average"])
def test_a_copy_is_a_plain_model_with_weights_of_its_own(make, way) -> None:
    model = build("no rule")
    clipping = way(model, 1.0)
    if make == "deepcopy":
        other = copy.deepcopy(model)
    elif make == "pickle":
        other = pickle.loads(pickle.dumps(model))  # noqa: S301 (our own)
    else:
        other = AveragedModel(model).module
    expected = model.losses(*batch()).detach()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)

    assert torch.allclose(other.losses(*batch()), expected, rtol=1e-12)
    assert type(other.body) is type(build("no rule").body)
    other.losses(*batch()).sum().backward()  # nobody clips it
    assert all(p.grad is not None for p in other.parameters())
    assert is_clear(model)
    way(other, 1.0).remove()
    assert type(model.head).__name__ == "Linear"
    clipping.backward(model.losses(*batch()))


def test_a_state_dict_fits_a_model_with_and_without_a_clipping() -> None:
    plain, clipped = build(), build("layer norm")
    before = plain.state_dict()
    clipping = BookKeeping(clipped, 0.5)
    clipped.load_state_dict(before)
    plain.load_state_dict(clipped.state_dict())
    assert list(clipped.state_dict()) == list(before)
    clipping.backward(clipped.losses(*batch()))
    clipping.remove()
    assert list(clipped.state_dict()) == list(before)


def test_a_removed_clipping_clips_nothing_more(way) -> None:
    model = build("linear")
    clipping = way(model, 1.0)
    losses = model.losses(*batch())
    clipping.remove()

    with pytest.raises(RuntimeError, match="this clipping was removed"):
        clipping.backward(losses)
    assert is_clear(model)


def test_a_clipping_that_could_not_be_made_leaves_a_plain_model(way) -> None:
    model = build("linear")
    kinds = [type(module) for module in model.modules()]
    *_, last = model.parameters()
    last.register_post_accumulate_grad_hook(lambda _: None)
    with pytest.raises(UnsupportedError, match="hook"):
        way(model, 1.0)

    assert [type(module) for module in model.modules()] == kinds
    model.losses(*batch()).sum().backward()
    assert not is_clear(model)
