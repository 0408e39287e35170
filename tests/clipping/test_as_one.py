"""Modules that use parameters themselves run as one layer each, exactly, or are refused.

Shape legend: B samples, T tokens, D width.
"""

import pytest
import torch
from small_models import FLAT, assert_exact, assert_exact_by_layer, is_clear
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from dpprof.private.engine.book_keeping import BookKeeping
from dpprof.private.errors import UnsupportedError

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


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = Router(), Experts()

    def forward(self, x):
        tokens = x.view(-1, D)
        _, shares, chosen = self.router(tokens)
        return self.experts(tokens, chosen, shares).view(x.shape)


class ListOfExperts(Mixture):
    """Its experts are layers, which see tokens in the order of experts."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(EXPERTS))

    def forward(self, x):
        tokens = x.view(-1, D)
        _, shares, chosen = self.router(tokens)
        y = torch.zeros_like(tokens)
        for expert, layer in enumerate(self.experts):
            token, at = torch.where(chosen == expert)
            y = y.index_add(0, token, layer(tokens[token]) * shares[token, at, None])
        return y.view(x.shape)


class Product(nn.Module):
    """Multiplies by a matrix of its own beside a layer."""

    def __init__(self, run=lambda m, x: m.layer(x @ m.own)) -> None:
        super().__init__()
        self.own, self.layer = nn.Parameter(torch.randn(D, D)), nn.Linear(D, D)
        self.run = run

    def forward(self, x, *others):
        return self.run(self, x, *others)


class Borrows(nn.Module):
    """Uses a layer's weight without the layer, as mixers of state-space models do."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(D, D, 2, groups=D)

    def forward(self, x):
        padded = functional.pad(x.transpose(1, 2), (1, 0))
        weight, bias = self.convolution.weight, self.convolution.bias
        return functional.conv1d(padded, weight, bias, groups=D).transpose(1, 2)


class Routes(nn.Module):
    """Multiplies by its own matrix and bias beside a layer, in a way that a rule sees."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.shift = nn.Parameter(torch.randn(D, D)), nn.Parameter(torch.randn(D))
        self.layer = nn.Linear(D, D)

    def forward(self, x):
        return self.layer(functional.linear(x, self.own, self.shift).softmax(-1)) + self.shift


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
    "experts": lambda: Between(Mixture()),
    "a product": lambda: Between(Product()),
    "another's weight": lambda: Between(Borrows()),
    "what a rule sees": lambda: Between(Routes()),
    "what a rule sees, checkpointed": lambda: Between(Routes(), checkpointed),
    "twice": lambda: Between(Product(), lambda inside, x: inside(inside(x).tanh())),
    "one in another": lambda: Between(Product(lambda m, x: m.layer(x @ m.own @ m.own.T) + x)),
    "with what is alike for all": lambda: Between(
        Product(lambda m, x, table: m.layer(x @ m.own) * table),
        lambda inside, x: inside(x, torch.arange(T * D, dtype=x.dtype).view(T, D).cos()),
    ),
    "in a dictionary": lambda: Between(
        Product(lambda m, x: {"y": (m.layer(x @ m.own), None), "n": 3}),
        lambda inside, x: inside(x)["y"][0],
    ),
}


@pytest.mark.parametrize("way", FLAT)
@pytest.mark.parametrize("samples", [1, B, T])
@pytest.mark.parametrize("what", EXACT)
def test_it_is_exact(what, samples, way) -> None:
    torch.manual_seed(0)
    model = EXACT[what]()
    x = draw(samples)

    clipping = assert_exact(way, model, (x,), bound=0.5)

    # The next batch runs as was decided in the first.
    before = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    clipping.backward(model.losses(x))
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-9, atol=1e-12)


def test_what_rules_see_runs_by_them() -> None:
    for what, is_one in (("a product", True), ("what a rule sees", False)):
        model = EXACT[what]()
        clipping = BookKeeping(model, 1.0)
        clipping.backward(model.losses(draw()))
        assert ("inside.layer.weight" in clipping.plan) == (not is_one)


@pytest.mark.parametrize("way", FLAT)
@pytest.mark.parametrize("names", [["inside"], ["insid*"]])
def test_a_declared_module_runs_as_one_layer(names, way) -> None:
    torch.manual_seed(0)
    model, x = Between(ListOfExperts()), draw()
    clipping = way(model, 0.5)
    with pytest.raises(UnsupportedError, match=r"inside.experts.* saw \d+ samples"):
        clipping.backward(model.losses(x))
    clipping.remove()

    declared = lambda *arguments: way(*arguments, as_one=names)  # noqa: E731
    assert_exact(declared, model, (x,), bound=0.5).remove()
    model.zero_grad()
    clipping = assert_exact_by_layer(model, (x,), model.losses, bound=0.1, as_one=names)
    assert len(clipping.groups) == 3


def test_checkpointing_needs_a_declaration() -> None:
    model, x = Between(Product(), checkpointed), draw()
    with pytest.raises(
        UnsupportedError, match=r"inside computes .* name it in as_one=\['inside'\]"
    ):
        BookKeeping(model, 0.5).backward(model.losses(x))

    model = Between(Product(), checkpointed)
    declared = lambda *arguments: BookKeeping(*arguments, as_one=["inside"])  # noqa: E731
    assert_exact(declared, model, (x,), bound=0.5)


USED_TWICE = ("twice", "what a rule sees", "what a rule sees, checkpointed")
"""What per-layer clipping refuses."""


@pytest.mark.parametrize("samples", [1, B, T])
@pytest.mark.parametrize("what", [one for one in EXACT if one not in USED_TWICE])
def test_per_layer_clipping_clips_such_a_module_as_a_layer(what, samples) -> None:
    torch.manual_seed(0)
    model = EXACT[what]()
    clipping = assert_exact_by_layer(model, (draw(samples),), model.losses, bound=0.1)

    assert clipping.sample_norms.shape == (samples, len(clipping.groups))
    own = [set(parameters) for parameters, _ in clipping.groups]
    assert sum(map(len, own)) == len(list(model.parameters()))


def test_names_that_fit_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match=r"as_one has 'insde', which no module"):
        BookKeeping(Between(Product()), 0.5, as_one=["insde"])


class Cache:
    def __init__(self, kept) -> None:
        self.kept = kept


REFUSED = {
    "dropout": (lambda m, x: functional.dropout(m.layer(x @ m.own), 0.5), "random|again"),
    "mixed samples": (lambda m, x: m.layer(x @ m.own) - x.mean(0), "another output"),
    "the batch's size": (lambda m, x: m.layer(x @ m.own) * len(x), "another output"),
    "a change in place": (lambda m, x: m.layer(x.mul_(2) @ m.own), "in place"),
    "a number for all": (lambda m, x: (m.layer(x @ m.own), (x @ m.own).sum()), "a number"),
    "time first": (lambda m, x: m.layer(x @ m.own).transpose(0, 1).flip(0), "not proven|run on"),
}


@pytest.mark.parametrize("way", FLAT)
@pytest.mark.parametrize("what", REFUSED)
def test_what_is_not_exact_is_refused_by_name(what, way) -> None:
    torch.manual_seed(0)
    run, message = REFUSED[what]
    model = Between(
        Product(run),
        lambda inside, x: (
            first_of(inside(x * 1)) if "time" not in what else (inside(x).flip(0).transpose(0, 1))
        ),
    )
    clipping = way(model, 0.5)

    with pytest.raises((UnsupportedError, RuntimeError, ValueError), match=message):
        clipping.backward(model.losses(draw()))
    assert is_clear(model)


def first_of(found):
    return found[0] if isinstance(found, tuple) else found


def test_objects_that_may_hold_samples_are_refused() -> None:
    model = Between(
        Product(lambda m, x, cache: m.layer(x @ m.own) + cache.kept),
        lambda inside, x: inside(x, Cache(x.detach())),
    )
    with pytest.raises(UnsupportedError, match="gets a Cache, which may hold tensors of samples"):
        BookKeeping(model, 0.5).backward(model.losses(draw()))


def test_another_use_than_the_first_is_refused() -> None:
    model = Between(Routes())
    clipping = BookKeeping(model, 0.5)
    clipping.backward(model.losses(draw()))
    model.zero_grad()
    model.call = lambda inside, x: inside(x) @ inside.own

    with pytest.raises(UnsupportedError, match=r"inside.own belongs to a module"):
        clipping.backward(model.losses(draw()))


def test_a_layer_inside_that_changes_between_forward_and_backward_is_refused() -> None:
    model = Between(Product())
    clipping = BookKeeping(model, 0.5)
    clipping.backward(model.losses(draw()))
    model.zero_grad()
    losses = model.losses(draw())
    with torch.no_grad():
        model.inside.layer.weight.mul_(1 + 1e-9)

    with pytest.raises(RuntimeError, match=r"inside.layer changed between forward and backward"):
        clipping.backward(losses)
