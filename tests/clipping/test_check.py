"""What cannot be seen from a layer's first axis is found by one check on a user's own batch."""

import copy

import pytest
import torch
from small_models import EVERY, FLAT, KINDS, build, draw
from torch import nn
from torch.nn import functional

from dpprof.clipping.book_keeping import BookKeeping
from dpprof.clipping.check import WrongGradientError


@pytest.mark.parametrize("way", EVERY)
@pytest.mark.parametrize(
    ("kind", "bias"), [k for k in KINDS if k[0] not in ("tied", "used twice", "norm used twice")]
)
def test_right_models_pass(kind, bias, way) -> None:
    model = build(kind, bias=bias)
    clipping = way(model, 0.3)
    ids, labels, weights = draw(4, 7)
    checked = clipping.check(model.losses, ids, labels, weights.double() + 0.1)

    assert checked.samples == 4
    assert checked.parameters == len(list(model.parameters()))
    assert checked.max_relative_error < 1e-8


@pytest.mark.parametrize("way", FLAT)
@pytest.mark.parametrize("kind", ["tied", "used twice", "norm used twice"])
def test_shared_and_reused_layers_pass(kind, way) -> None:
    model = build(kind, bias=False)
    ids, labels, weights = draw(4, 7)
    checked = way(model, 0.3).check(model.losses, ids, labels, weights.double())

    assert checked.max_relative_error < 1e-8


@pytest.mark.parametrize("way", EVERY)
def test_it_leaves_everything_as_it_was(way) -> None:
    model = build()
    model.add_module("dropout", nn.Dropout(0.5))
    clipping = way(model, 0.3)
    ids, labels, weights = draw(4, 7)
    batch = (ids, labels, weights.double())
    clipping.backward(model.losses(*batch))
    before = [p.grad.clone() for p in model.parameters()]
    parameters = copy.deepcopy(model.state_dict())
    norms, random = clipping.sample_norms, torch.get_rng_state()
    clipping.check(model.losses, *batch)

    assert clipping.batches == 1
    assert clipping.sample_norms is norms
    assert model.dropout.p == 0.5
    assert torch.equal(torch.get_rng_state(), random)
    for one, other in zip(model.parameters(), before, strict=True):
        assert torch.equal(one.grad, other)
    for name, value in model.state_dict().items():
        assert torch.equal(value, parameters[name])
    clipping.backward(model.losses(*batch))  # what it left is still its own


class Wrong(nn.Module):
    """Two layers, between which something happens that no layer sees."""

    def __init__(self, between, *, T: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(5, 6)
        self.second = nn.Linear(6, 3)
        self.table = nn.Embedding(T, 6)
        self.between = between

    def forward(self, x_BTd):
        return self.second(self.between(self, self.first(x_BTd).tanh()))


def mixed(_, h):
    return h - h.mean(0)


def permuted(_, h):
    return h.flip(0)


def swapped(_, h):
    return h + h.transpose(0, 1).mean(2, keepdim=True)


def looked_up_once(model, h):
    return h + model.table(torch.arange(h.shape[1])[:, None].expand(-1, 1)).transpose(0, 1)


@pytest.mark.parametrize("way", EVERY)
@pytest.mark.parametrize("between", [mixed, permuted, swapped], ids=lambda f: f.__name__)
def test_samples_that_are_mixed_between_layers_are_found(between, way) -> None:
    model = Wrong(between).double()
    clipping = way(model, 0.1)
    x = torch.randn(4, 4, 5, dtype=torch.float64)

    def losses_of(x):
        return model(x).square().sum((1, 2))

    with pytest.raises(WrongGradientError, match=r"sample \d"):
        clipping.check(losses_of, x)


@pytest.mark.parametrize("way", EVERY)
def test_positions_that_are_looked_up_once_for_all_are_found(way) -> None:
    """As many positions as samples: the first axis is as long as the batch's."""
    model = Wrong(looked_up_once).double()
    clipping = way(model, 0.1)
    x = torch.randn(4, 4, 5, dtype=torch.float64)

    with pytest.raises(
        WrongGradientError, match=r"table\.weight: the gradient of sample 0 has norm"
    ):
        clipping.check(lambda x: model(x).square().sum((1, 2)), x)


@pytest.mark.parametrize("way", EVERY)
def test_a_batch_that_comes_second_is_found(way) -> None:
    model = Wrong(lambda _, h: h).double()
    clipping = way(model, 0.1)
    x = torch.randn(4, 4, 5, dtype=torch.float64)

    def losses_of(x_BTd):
        return model(x_BTd.transpose(0, 1)).square().sum((0, 2))

    with pytest.raises(
        WrongGradientError, match=r"first\.weight: the gradient of sample 0 has norm"
    ):
        clipping.check(losses_of, x)


@pytest.mark.parametrize("way", EVERY)
def test_a_permutation_that_losses_undo_is_found(way) -> None:
    model = Wrong(lambda _, h: h).double()
    clipping = way(model, 0.1)
    x = torch.randn(4, 4, 5, dtype=torch.float64)

    def losses_of(x_BTd):
        return model(x_BTd.roll(1, 0)).square().sum((1, 2)).roll(-1, 0)

    # The told norms of the batch are in another order than its losses.
    with pytest.raises(WrongGradientError, match=r"first\.weight"):
        clipping.check(losses_of, x)


def test_a_layer_that_trains_on_a_part_is_found() -> None:
    class Part(nn.Linear):
        def forward(self, x):
            whole = super().forward(x)
            return torch.cat([whole[:1], whole[1:].detach()])

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), Part(6, 3)).double()
    clipping = BookKeeping(model, 0.1)
    with pytest.raises(WrongGradientError, match="is not the sum of the samples"):
        clipping.check(lambda x: model(x).square().sum((1, 2)), torch.randn(3, 4, 5).double())


def test_losses_that_look_at_their_neighbours_are_found() -> None:
    model = build()

    def losses_of(ids, labels):
        logits = model(ids)
        losses = functional.cross_entropy(logits.transpose(1, 2), labels, reduction="none")
        return losses.sum(1) / losses.numel()  # a mean over all tokens of the batch

    with pytest.raises(WrongGradientError, match=r"the loss of sample 0 is .* alone, "):
        BookKeeping(model, 1.0).check(losses_of, *draw(4, 7)[:2])


def test_random_losses_are_refused() -> None:
    model = build()
    with pytest.raises(ValueError, match="losses_of is random"):
        BookKeeping(model, 1.0).check(
            lambda ids: functional.dropout(model(ids)).sum((1, 2)), draw(4, 7)[0]
        )


def test_a_batch_of_one_shows_nothing() -> None:
    model = build()
    with pytest.raises(ValueError, match=r"at least two samples, samples first; it is \(1, 7\)"):
        BookKeeping(model, 1.0).check(lambda ids: model(ids).sum((1, 2)), draw(1, 7)[0])


def test_autocast_passes_within_its_precision() -> None:
    model = build("linear").float()
    ids, labels, weights = draw(4, 7)

    def losses_of(*batch):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return model.losses(*batch)

    checked = BookKeeping(model, 0.3).check(losses_of, ids, labels, weights)
    assert 1e-4 < checked.max_relative_error < 0.05
