"""Every parameter that is trained is clipped, or the step is refused by name."""

import copy
import re

import pytest
import torch
from small_models import EVERY, FLAT, batch, build, each_of, gradients, is_clear, private
from torch import nn
from torch.nn.utils import parametrize

from dpprof.private import BookKeeping, PerLayerClipping, UnsupportedError

way = each_of(EVERY)

CHANGES = {
    "head.weight is trained and not clipped: .*thawed": nn.Module.requires_grad_,
    "body.bias is trained and not clipped: .*thawed": nn.Module.requires_grad_,
    "head.weight is trained and not clipped: .*replaced": lambda model: setattr(
        model, "head", nn.Linear(6, 6, bias=False).double()
    ),
    "head.weight is trained and not clipped: .*moved or tied": lambda model: setattr(
        model.head, "weight", model.embedding.weight
    ),
    "embedding.weight is trained and not clipped: .*replaced": lambda model: model.load_state_dict(
        build().state_dict(), assign=True
    ),
}


@pytest.mark.parametrize("told", CHANGES)
def test_a_model_that_was_changed_later_is_refused_by_name(told, way) -> None:
    model = build()
    model.get_parameter(told.split()[0]).requires_grad_("thawed" not in told)
    clipping = way(model, 1e-3)
    CHANGES[told](model)
    with pytest.raises(RuntimeError, match=told):
        clipping.backward(model.losses(*batch()))
    assert is_clear(model)


@pytest.mark.parametrize("kind", ["rms norm", "layer norm", "linear", "conv1d", "no rule"])
@pytest.mark.parametrize("when", ["before forward", "after forward"])
def test_what_is_frozen_later_is_left_as_it_is(kind, way, when) -> None:
    model = build(kind)
    clipping = way(model, 1e-3)
    optimizer = private(clipping, model, noise_multiplier=1.0)
    if when == "before forward":
        model.body.requires_grad_(False)
    losses = model.losses(*batch())
    model.body.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    clipping.backward(losses)
    optimizer.step()

    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) == name.startswith("body")


@pytest.mark.parametrize("bound", [0.0, -1.0, 9e-39, 2e38, float("inf"), float("nan")])
def test_a_bound_that_is_none_is_refused(bound) -> None:
    with pytest.raises(ValueError, match=re.escape(f"and is {bound}")):
        BookKeeping(build(), bound)
    clipping = BookKeeping(build(), 1.0)
    with pytest.raises(ValueError, match="max_grad_norm must be"):
        clipping.max_grad_norm = bound


def test_a_parametrized_weight_is_refused_before_and_after(way) -> None:
    class Double(nn.Module):
        def forward(self, x):
            return 2 * x

    model = build()
    clipping = way(model, 1.0)
    parametrize.register_parametrization(model.head, "weight", Double())
    with pytest.raises(RuntimeError, match=r"head\.parametrizations\.weight\.original is trained"):
        clipping.backward(model.losses(*batch()))
    old = torch.nn.utils.weight_norm(nn.Linear(4, 3))
    with pytest.raises(UnsupportedError, match="has a parameter weight_g that its rule"):
        way(old, 1.0)


def test_an_ordinary_gradient_past_the_layers_is_refused() -> None:
    model = build()
    BookKeeping(model, 1.0)
    with pytest.raises(RuntimeError, match=r"a gradient of head\.weight that is not clipped"):
        model.head.weight.square().sum().backward()


@pytest.mark.parametrize(
    ("way", "kind"), [*((way, "used twice") for way in FLAT), (PerLayerClipping, "linear")]
)
def test_parts_of_a_batch_add_up_even_if_their_graphs_live_together(way, kind) -> None:
    model, expected = build(kind), build(kind)
    way(expected, 0.5).backward(expected.losses(*batch()))
    clipping = way(model, 0.5)
    parts = [[part[some] for part in batch()] for some in (slice(0, 1), slice(1, 4))]
    for losses in [model.losses(*part) for part in parts]:
        clipping.backward(losses)

    torch.testing.assert_close(gradients(model), gradients(expected), rtol=1e-12, atol=1e-15)
