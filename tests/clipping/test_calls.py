"""Backward differentiates the forward that ran, or refuses; and layers' outputs may be changed."""

import copy
import threading

import pytest
import torch
from products import one_in
from small_models import EVERY, FLAT, Composed, Conv1D, Scale, gradients, is_clear, one_by_one
from torch import nn
from torch.utils.checkpoint import checkpoint

from dpprof.private import BookKeeping
from dpprof.private.contributions.contributions import storage_of

B, T, D = 3, 4, 6


class Tempered(nn.Module):
    """A layer without a rule that reads an attribute, and counts its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.temperature, self.calls = nn.Parameter(torch.randn(D)), 2.0, 0

    def forward(self, x):
        self.calls += 1
        return x * self.weight / self.temperature


class Model(nn.Module):
    """Each kind of layer, checkpointed or not."""

    def __init__(self, *, checkpointed: bool) -> None:
        super().__init__()
        self.checkpointed = checkpointed
        self.table = nn.Embedding(9, D)
        self.norm = nn.LayerNorm(D)
        self.rms = nn.RMSNorm(D)
        self.linear = nn.Linear(D, D)
        self.conv1d = Conv1D(D, D)
        self.leaf = Tempered()
        self.dropout = nn.Dropout(0.5)
        self.head = nn.Linear(D, D, bias=False)

    def inner(self, x):
        return self.leaf(self.conv1d(self.linear(self.rms(self.norm(x))).tanh()))

    def forward(self, ids):
        x = self.table(ids)
        x = checkpoint(self.inner, x, use_reentrant=False) if self.checkpointed else self.inner(x)
        return self.head(self.dropout(x))


def build(way, *, checkpointed: bool = False):
    torch.manual_seed(0)
    model = Model(checkpointed=checkpointed)
    clipping = way(model, 0.5)
    return model, clipping, model(torch.randint(9, (B, T))).square().sum((1, 2))


def write(name: str):
    def change(model):
        with torch.no_grad():
            model.get_parameter(name).add_(1)

    return change


def give_other_data(model) -> None:
    model.linear.weight.data = model.linear.weight.data.clone()


CHANGES = {
    "eval": (lambda model: model.eval(), "training was True, and is False"),
    "eval of one layer": (lambda model: model.norm.eval(), "norm changed between forward and"),
    **{
        f"{layer}.{name}": (
            write(f"{layer}.{name}"),
            rf"{layer} changed .*{name} was changed in",
        )
        for layer, name in (
            *(("table", "weight"), ("linear", "weight"), ("linear", "bias"), ("norm", "weight")),
            *(("rms", "weight"), ("conv1d", "weight"), ("leaf", "weight")),
        )
    },
    "an attribute": (
        lambda model: setattr(model.leaf, "temperature", 1.0),
        r"leaf changed .*temperature is another one",
    ),
    "epsilon": (lambda model: setattr(model.norm, "eps", 1.0), r"norm changed .*eps is another"),
    "other data": (give_other_data, r"linear changed .*weight was changed in place"),
    "another dtype": (lambda model: model.double(), r"changed .*was changed in place"),
    "an optimizer's step": (
        lambda model: torch.optim.SGD([_with_gradient(model.linear.weight)], lr=0.1).step(),
        r"linear changed .*weight was changed in place",
    ),
}


def _with_gradient(parameter):
    parameter.grad = torch.ones_like(parameter)
    return parameter


@pytest.mark.parametrize(
    ("change", "way", "checkpointed"), one_in(3, CHANGES, EVERY, [False, True])
)
def test_a_change_between_forward_and_backward_is_refused_by_name(change, way, checkpointed):
    model, clipping, losses = build(way, checkpointed=checkpointed)
    make, message = CHANGES[change]
    make(model)
    for parameter in model.parameters():
        parameter.grad = None

    with pytest.raises(RuntimeError, match=message):
        clipping.backward(losses)
    assert is_clear(model)


@pytest.mark.parametrize("way", EVERY)
def test_a_change_that_is_undone_and_a_layers_own_counter_are_none(way) -> None:
    model, clipping, losses = build(way)
    model.eval()
    with torch.no_grad():
        model(torch.randint(9, (B, T)))  # an evaluation counts calls too
    model.train()

    clipping.backward(losses)
    assert model.leaf.calls > 2


def test_a_frozen_layers_weight_is_looked_at_too() -> None:
    model, clipping, losses = build(BookKeeping)
    model.linear.requires_grad_(False)
    with torch.no_grad():
        model.linear.weight.add_(1)
    with pytest.raises(RuntimeError, match=r"linear changed .*weight was changed in place"):
        clipping.backward(losses)


IN_PLACE = {
    "relu": lambda h, _: torch.relu_(h),
    "added": lambda h, x: h.add_(x.sum(-1, keepdim=True)),
    "masked": lambda h, _: h.masked_fill_(torch.ones_like(h).cumsum(-1) > 3, 0),
    "scaled": lambda h, _: h.mul_(2),
    "a part": lambda h, _: scale_first(h),
}


def scale_first(h):
    h[..., :1] *= 3
    return h


PARAMETER = "no rule, its parameter"
LAYERS = {
    "linear": lambda: nn.Linear(D, D),
    "linear without bias": lambda: nn.Linear(D, D, bias=False),
    "conv1d": lambda: Conv1D(D, D),
    "layer norm": lambda: nn.LayerNorm(D),
    "rms norm": lambda: nn.RMSNorm(D),
    "no rule": lambda: Scale(D),
    "no rule, its input": lambda: Composed(lambda _, x: x[:, :], weight=torch.randn(T, D)),
    PARAMETER: lambda: Composed(
        lambda m, x: m.weight.expand(len(x), T, D), weight=torch.randn(T, D)
    ),
}


def losses_of(model, change, x):
    first, layer, last = model
    h = change(layer(first(x)), x)
    return last(h).square().flatten(1).sum(1)


@pytest.mark.parametrize(
    ("change", "axes", "layer", "way"),
    one_in(
        8,
        *(IN_PLACE, (2, 3, 4), LAYERS, FLAT),
        unless=lambda _, axes, layer, *__: layer == PARAMETER and axes != 3,
    ),
)
def test_code_may_change_a_layers_output_in_place(change, axes, layer, way) -> None:
    model = nn.ModuleList([nn.Linear(D, D), LAYERS[layer](), nn.Linear(D, D)]).double()
    x = torch.randn(B, *[T, 2][: axes - 2], D, dtype=torch.float64)

    def out_of_place(x):  # autograd refuses what changes a leaf's view
        return losses_of(model, lambda h, x: IN_PLACE[change](h.clone(), x), x)

    _, expected, _ = one_by_one(out_of_place, model, (x,), 0.5)
    weights = copy.deepcopy(model.state_dict())
    clipping = way(model, 0.5)
    clipping.backward(losses_of(model, IN_PLACE[change], x))

    torch.testing.assert_close(gradients(model), expected, rtol=1e-9, atol=1e-12)
    assert all(torch.equal(weights[name], one) for name, one in model.state_dict().items())


def test_one_backward_at_a_time(way) -> None:
    _, clipping, losses = build(way)
    found = []

    def enter(phase):
        if phase == "backward":
            thread = threading.Thread(target=again)
            thread.start()
            thread.join()

    def again():
        with pytest.raises(RuntimeError, match="another backward of this clipping is under way"):
            clipping.backward(losses)
        found.append(True)

    clipping.backward(losses, enter)
    assert found == [True]


def test_memory_that_was_freed_is_not_taken_for_another() -> None:
    """A storage often gets the address of one that was freed before."""
    freed = [torch.empty(8) for _ in range(200)]
    addresses = {one.untyped_storage()._cdata for one in freed}
    known = {storage_of(one) for one in freed}
    del freed
    alive = [torch.empty(8) for _ in range(200)]

    assert not known.intersection(map(storage_of, alive))
    assert not addresses.intersection(one.untyped_storage()._cdata for one in alive)
    assert storage_of(alive[0][2:]) == storage_of(alive[0])
