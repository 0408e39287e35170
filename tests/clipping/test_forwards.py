"""Trained parameters change in the optimizer's step, or by hand before a forward; never in one."""

import copy
import inspect
from contextlib import nullcontext

import pytest
import torch
from small_models import EVERY, each_of, is_clear, private, squares
from torch import nn

from dpprof.private import BookKeeping
from dpprof.private.refusals import forwards

way = each_of(EVERY)

B, D = 4, 6


class ActNorm(nn.Module):
    """Starts with its first batch's mean, written in some way."""

    def __init__(self, write, *, trained: bool = True, size: int = D) -> None:
        super().__init__()
        self.b = nn.Parameter(torch.zeros(size), requires_grad=trained)
        self.write, self.is_on = write, False

    def forward(self, x):
        if not self.is_on:
            with torch.no_grad():
                self.write(self, x.detach().mean(0))
        self.is_on = True
        return x + self.b[: x.shape[1]]


def write_data(module, mean) -> None:
    module.b.data[: len(mean)].copy_(-mean)


def write_other_data(module, mean) -> None:
    module.b.data = torch.cat([-mean, module.b.data[len(mean) :]])


def write_numpy(module, mean) -> None:
    module.b.detach().numpy()[: len(mean)] = -mean.numpy()


def write_one(module, mean) -> None:
    module.b.data[3] = mean[0]


WRITES = {
    "in place": lambda module, mean: module.b.sub_(mean),
    ".data": write_data,
    "other .data": write_other_data,
    "NumPy": write_numpy,
    "one element": write_one,
    "exchanged elements": lambda module, _: module.b.data.copy_(module.b.data.flip(0)),
}


def alone(module):
    return module


def first(module):
    return nn.Sequential(module, nn.Linear(D, D))


def last(module):
    return nn.Sequential(nn.Linear(D, D), module)


class Root(nn.Sequential):
    """Holds the parameter itself, and writes it before any layer runs."""

    def __init__(self, module) -> None:
        super().__init__(nn.Linear(D, D))
        self.b, self.write, self.is_on = module.b, module.write, False

    def forward(self, x):
        return super().forward(ActNorm.forward(self, x))


@pytest.mark.parametrize(
    ("place", "way"),
    [*((first, way) for way in EVERY), *((place, BookKeeping) for place in (alone, last, Root))],
)
@pytest.mark.parametrize("kind", WRITES)
def test_a_parameter_that_forward_writes_is_refused_for_good(kind, place, way) -> None:
    module = ActNorm(WRITES[kind])
    nn.init.normal_(module.b)
    model = place(module)
    clipping = way(model, 1.0)
    optimizer = private(clipping, model)
    name = next(name for name, one in model.named_parameters() if one is module.b)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=rf"^{name}.* was changed .*make a new clipping"):
            clipping.backward(squares(model, torch.randn(B, D)))
        assert is_clear(model)
        with pytest.raises(RuntimeError, match="no batch was clipped"):
            optimizer.step()


@pytest.mark.parametrize("with_gradients", [True, False])
def test_a_call_of_the_model_before_training_writes_nothing(with_gradients) -> None:
    """As flows are started: one batch through the model, whose result nobody differentiates."""
    model = first(ActNorm(write_data))
    clipping = BookKeeping(model, 1.0)
    with (
        nullcontext() if with_gradients else torch.no_grad(),
        pytest.raises(RuntimeError, match=r"0\.b, through \.data, was changed"),
    ):
        model(torch.randn(B, D))
    with pytest.raises(RuntimeError, match=r"0\.b, through \.data, was changed"):
        clipping.backward(squares(model, torch.randn(B, D)))


def test_code_between_a_call_of_the_model_and_backward_writes_nothing(way) -> None:
    model = Root(ActNorm(lambda *_: None))
    clipping = way(model, 1.0)
    x = torch.randn(B, D)
    y = squares(model, x)
    model.b.data.copy_(x.mean(0))
    with pytest.raises(RuntimeError, match=r"b, through \.data, was changed between"):
        clipping.backward(y)


@pytest.mark.parametrize("size", [5 * forwards.MOST, 33 * forwards.MOST + 1])
def test_a_write_of_a_row_of_a_large_parameter_is_seen(size) -> None:
    """Every k-th element is read: of k in a row, one."""
    step = -(-size // forwards.MOST) | 1

    def write(module, mean) -> None:
        start = int(torch.randint(size - step, ()))
        module.b.data[start : start + step] += 1

    for _ in range(20):
        model = first(ActNorm(write, size=size))
        with pytest.raises(RuntimeError, match=r"0\.b, through \.data"):
            BookKeeping(model, 1.0).backward(squares(model, torch.randn(B, D)))


def test_it_is_seen_at_some_later_step_too() -> None:
    model = first(ActNorm(lambda *_: None))
    clipping = BookKeeping(model, 1.0)
    optimizer = private(clipping, model, lr=1e-3)

    def train(steps: int) -> None:
        for _ in range(steps):
            model[0].is_on = False
            clipping.backward(squares(model, torch.randn(B, D)))
            optimizer.step()
            optimizer.zero_grad()

    train(forwards.FIRST + 20)
    model[0].write = write_data
    with pytest.raises(RuntimeError, match=r"a parameter of torch\.float32 on cpu, through \.data"):
        train(400)  # which pass with a probability of 1e-11


def swap(model) -> None:
    for one in model.parameters():
        one.data = one.data.clone() * 0.9


BY_HAND = {
    "loaded": lambda model: model.load_state_dict(
        {name: one * 0.5 for name, one in model.state_dict().items()}
    ),
    "swapped": swap,
    "clamped": lambda model: [one.data.clamp_(-0.1, 0.1) for one in model.parameters()],
    "written": lambda model: [nn.init.ones_(one) for one in model.parameters()],
}


@pytest.mark.parametrize("kind", BY_HAND)
def test_between_a_step_and_a_forward_parameters_are_the_users(way, kind) -> None:
    model = nn.Sequential(ActNorm(lambda *_: None), nn.Linear(D, D), nn.Linear(D, 1))
    clipping = way(model, 1.0)
    optimizer = private(clipping, model, lr=1e-3)
    for _ in range(3):
        clipping.backward(squares(model, torch.randn(B, D)))
        logged = squares(model, torch.randn(B, D))  # whose graph nobody differentiates
        optimizer.step()
        optimizer.zero_grad()
        BY_HAND[kind](model)
        with torch.no_grad():
            model.eval()(torch.randn(B, D))
        model.train()
        squares(model, torch.randn(B, D))
        optimizer.original_optimizer.zero_grad()
        clipping.backward(torch.zeros(0))  # no forward ran for
        optimizer.step()
        optimizer.zero_grad()
        del logged


def test_layers_that_are_called_alone_begin_a_forward_too() -> None:
    model = nn.Sequential(nn.Linear(D, D), ActNorm(write_data), nn.Linear(D, 1))
    clipping = BookKeeping(model, 1.0)
    with pytest.raises(RuntimeError, match=r"1\.b, through \.data, was changed"):
        clipping.backward(model[2](model[1](model[0](torch.randn(B, D)))).square().sum(1))


def test_what_its_owner_says_is_public_may_be_written() -> None:
    model = first(ActNorm(lambda module, _: module.b.data.clamp_(-1, 1)))
    clipping = BookKeeping(model, 1.0, public_buffers=["0.b"])
    for _ in range(2):
        clipping.backward(squares(model, torch.randn(B, D)))
        nn.init.constant_(model[0].b, 3)
        model.zero_grad()


@pytest.mark.parametrize("place", [first, alone])
def test_a_watched_model_has_its_signature_and_plain_copies(place) -> None:
    model = place(ActNorm(lambda *_: None))
    kind, signature = type(model), inspect.signature(model.forward)
    clipping = BookKeeping(model, 1.0)
    assert (type(model).__name__, type(model).__module__) == (kind.__name__, kind.__module__)
    assert isinstance(model, kind)
    if place is first:  # else a rule runs it
        assert inspect.signature(model.forward) == signature
    other = copy.deepcopy(model)
    assert type(other) is kind
    assert not any("clipping" in name for name in vars(other))
    other(torch.randn(B, D)).sum().backward()
    clipping.remove()
    assert type(model) is kind
    assert vars(model).keys() == vars(other).keys()
