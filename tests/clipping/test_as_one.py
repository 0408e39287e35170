"""Modules that use parameters themselves run as one layer each, exactly, or are refused."""

from types import SimpleNamespace

import pytest
import torch
from small_models import Composed, assert_exact, assert_exact_by_layer, gradients, is_clear
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from dpprof.private import BookKeeping, UnsupportedError

B, T, D, EXPERTS = 3, 4, 6, 3


class Router(nn.Module):
    """Chooses experts for tokens; returns several tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, D))

    def forward(self, x):
        probabilities = functional.linear(x, self.weight).softmax(1)
        return probabilities, *probabilities.topk(2, 1)


class Experts(nn.Module):
    """Runs each expert on the tokens that chose it, as transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, D, D))

    def forward(self, x, chosen, shares):
        y = torch.zeros_like(x)
        for expert in chosen.unique().tolist():
            token, at = torch.where(chosen == expert)
            found = functional.linear(x[token], self.up[expert]).tanh()
            y.index_add_(0, token, found * shares[token, at, None])
        return y


def mix(m, x):
    tokens = x.view(-1, D)
    _, shares, chosen = m.router(tokens)
    return m.experts(tokens, chosen, shares).view(x.shape)


def mix_layers(m, x):
    """Mix experts that are layers, which see tokens in the order of experts."""
    tokens = x.view(-1, D)
    _, shares, chosen = m.router(tokens)
    y = torch.zeros_like(tokens)
    for expert, layer in enumerate(m.experts):
        token, at = torch.where(chosen == expert)
        y = y.index_add(0, token, layer(tokens[token]) * shares[token, at, None])
    return y.view(x.shape)


def mixture_of_layers():
    experts = nn.ModuleList(nn.Linear(D, D) for _ in range(EXPERTS))
    return Between(Composed(mix_layers, router=Router(), experts=experts))


def product(run=lambda m, x: m.layer(x @ m.own)):
    """Multiply by a matrix of the module's own beside a layer."""
    return Composed(run, own=torch.randn(D, D), layer=nn.Linear(D, D))


def borrow(m, x):
    """Use a layer's weight without the layer, as mixers of state-space models do."""
    padded = functional.pad(x.transpose(1, 2), (1, 0))
    weight, bias = m.convolution.weight, m.convolution.bias
    return functional.conv1d(padded, weight, bias, groups=D).transpose(1, 2)


def route_visibly():
    """Multiply by its own matrix and bias beside a layer, in a way that a rule sees."""
    return Composed(
        lambda m, x: m.layer(functional.linear(x, m.own, m.shift).softmax(-1)) + m.shift,
        own=torch.randn(D, D),
        shift=torch.randn(D),
        layer=nn.Linear(D, D),
    )


class Between(nn.Module):
    """A module between two layers, and how it is called."""

    def __init__(self, inside, call=lambda inside, x: inside(x)) -> None:
        super().__init__()
        self.first, self.inside, self.last = nn.Linear(D, D), inside, nn.Linear(D, D)
        self.call = call
        self.double()

    def forward(self, x):
        return self.last(self.call(self.inside, self.first(x).tanh()))

    def losses(self, x):
        return self(x).square().sum((1, 2))


def draw(samples=B):
    return torch.randn(samples, T, D, dtype=torch.float64)


def checkpointed(inside, x):
    return checkpoint(inside, x, use_reentrant=False)


EXACT = {
    "experts": lambda: Between(Composed(mix, router=Router(), experts=Experts())),
    "a product": lambda: Between(product()),
    "another's weight": lambda: Between(Composed(borrow, convolution=nn.Conv1d(D, D, 2, groups=D))),
    "what a rule sees": lambda: Between(route_visibly()),
    "what a rule sees, checkpointed": lambda: Between(route_visibly(), checkpointed),
    "twice": lambda: Between(product(), lambda inside, x: inside(inside(x).tanh())),
    "one in another": lambda: Between(product(lambda m, x: m.layer(x @ m.own @ m.own.T) + x)),
    "with what is alike for all": lambda: Between(
        product(lambda m, x, table: m.layer(x @ m.own) * table),
        lambda inside, x: inside(x, torch.arange(T * D, dtype=x.dtype).view(T, D).cos()),
    ),
    "in a dictionary": lambda: Between(
        product(lambda m, x: {"y": (m.layer(x @ m.own), None), "n": 3}),
        lambda inside, x: inside(x)["y"][0],
    ),
}


@pytest.mark.parametrize("samples", [1, B, T])
@pytest.mark.parametrize("what", EXACT)
def test_it_is_exact(what, samples, way) -> None:
    model, x = EXACT[what](), draw(samples)
    clipping = assert_exact(way, model, (x,), bound=0.5)

    # The next batch runs as was decided in the first.
    before = gradients(model)
    model.zero_grad()
    clipping.backward(model.losses(x))
    torch.testing.assert_close(gradients(model), before, rtol=1e-9, atol=1e-12)


def test_what_rules_see_runs_by_them() -> None:
    for what, is_one in (("a product", True), ("what a rule sees", False)):
        model = EXACT[what]()
        clipping = BookKeeping(model, 1.0)
        clipping.backward(model.losses(draw()))
        assert ("inside.layer.weight" in clipping.plan) == (not is_one)


@pytest.mark.parametrize("names", [["inside"], ["insid*"]])
def test_a_declared_module_runs_as_one_layer(names, way) -> None:
    model, x = mixture_of_layers(), draw()
    assert_exact(way, model, (x,), bound=0.5).remove()  # the graph shows whose tokens experts get
    model.zero_grad()
    assert_exact(way, model, (x,), bound=0.5, as_one=names).remove()
    model.zero_grad()
    clipping = assert_exact_by_layer(model, (x,), model.losses, bound=0.1, as_one=names)
    assert len(clipping.groups) == 3


def test_checkpointing_needs_a_declaration() -> None:
    model, x = Between(product(), checkpointed), draw()
    with pytest.raises(UnsupportedError, match=r"inside computes .* it in as_one=\['inside'\]"):
        BookKeeping(model, 0.5).backward(model.losses(x))
    assert_exact(BookKeeping, Between(product(), checkpointed), (x,), bound=0.5, as_one=["inside"])


USED_TWICE = ("twice", "what a rule sees", "what a rule sees, checkpointed")
"""What per-layer clipping refuses."""


@pytest.mark.parametrize("samples", [1, B, T])
@pytest.mark.parametrize("what", [one for one in EXACT if one not in USED_TWICE])
def test_per_layer_clipping_clips_such_a_module_as_a_layer(what, samples) -> None:
    model = EXACT[what]()
    clipping = assert_exact_by_layer(model, (draw(samples),), model.losses, bound=0.1)

    assert clipping.sample_norms.shape == (samples, len(clipping.groups))
    own = [set(parameters) for parameters, _ in clipping.groups]
    assert sum(map(len, own)) == len(list(model.parameters()))


def test_names_that_fit_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match=r"as_one has 'insde', which no module"):
        BookKeeping(Between(product()), 0.5, as_one=["insde"])


REFUSED = {
    "dropout": (lambda m, x: functional.dropout(m.layer(x @ m.own), 0.5), "random|again"),
    "mixed samples": (lambda m, x: m.layer(x @ m.own) - x.mean(0), "another output"),
    "the batch's size": (lambda m, x: m.layer(x @ m.own) * len(x), "another output"),
    "a change in place": (lambda m, x: m.layer(x.mul_(2) @ m.own), "in place"),
    "a number for all": (lambda m, x: (m.layer(x @ m.own), (x @ m.own).sum()), "a number"),
    "time first": (lambda m, x: m.layer(x @ m.own).transpose(0, 1).flip(0), "not proven|run on"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_exact_is_refused_by_name(what, way) -> None:
    run, message = REFUSED[what]
    call = (
        (lambda inside, x: inside(x).flip(0).transpose(0, 1))
        if what == "time first"
        else (lambda inside, x: first_of(inside(x * 1)))
    )
    model = Between(product(run), call)
    with pytest.raises((UnsupportedError, RuntimeError, ValueError), match=message):
        way(model, 0.5).backward(model.losses(draw()))
    assert is_clear(model)


def first_of(outputs):
    return outputs[0] if isinstance(outputs, tuple) else outputs


def test_objects_that_may_hold_samples_are_refused() -> None:
    model = Between(
        product(lambda m, x, cache: m.layer(x @ m.own) + cache.kept),
        lambda inside, x: inside(x, SimpleNamespace(kept=x.detach())),
    )
    with pytest.raises(UnsupportedError, match="gets a SimpleNamespace, which may hold tensors of"):
        BookKeeping(model, 0.5).backward(model.losses(draw()))


def test_another_use_than_the_first_is_refused() -> None:
    model = Between(route_visibly())
    clipping = BookKeeping(model, 0.5)
    clipping.backward(model.losses(draw()))
    model.zero_grad()
    model.call = lambda inside, x: inside(x) @ inside.own

    with pytest.raises(UnsupportedError, match=r"inside.own belongs to a module"):
        clipping.backward(model.losses(draw()))


def test_a_layer_inside_that_changes_between_forward_and_backward_is_refused() -> None:
    model = Between(product())
    clipping = BookKeeping(model, 0.5)
    clipping.backward(model.losses(draw()))
    model.zero_grad()
    losses = model.losses(draw())
    with torch.no_grad():
        model.inside.layer.weight.mul_(1 + 1e-9)

    with pytest.raises(RuntimeError, match=r"inside.layer changed between forward and backward"):
        clipping.backward(losses)
