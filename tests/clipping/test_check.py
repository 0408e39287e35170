"""What cannot be seen from a layer's first axis is found by one check on a user's own batch."""

import re
from functools import partial

import pytest
import torch
from products import one_in
from small_models import EVERY, KINDS, Composed, batch, build, each_of, is_clear, squares
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from dpprof.private import BookKeeping, PerLayerClipping, WrongTrainingError

way = each_of(EVERY)


def is_refused(way, kind) -> bool:
    """Per-layer clipping refuses parameters that are used twice."""
    return way is PerLayerClipping and (kind[0] == "tied" or "twice" in kind[0])


@pytest.mark.parametrize(("way", "kind"), one_in(3, EVERY, KINDS, unless=is_refused))
def test_right_models_pass(way, kind) -> None:
    kind, bias = kind
    model = build(kind, bias=bias)
    model.register_buffer("places", torch.tensor([0.0, torch.nan]))  # which stays as it is
    ids, labels, weights = batch()
    weights = weights + 0.1 if bias else weights  # one of the weights is 0
    clipping, random = way(model, 0.3), torch.get_rng_state()
    checked = clipping.check(model.losses, ids, labels, weights)

    assert (clipping.batches, clipping.sample_norms) == (0, None)
    assert torch.equal(torch.get_rng_state(), random)
    assert is_clear(model)
    assert checked.samples == 4
    assert checked.parameters == len(list(model.parameters()))
    assert checked.max_relative_error < 1e-8
    assert not clipping.first_batch_verified
    for _ in range(2):
        clipping.backward(model.losses(*batch()))
    assert clipping.first_batch_verified


def build_around(between):
    """Two layers, between which something happens that no layer sees."""
    return Composed(
        lambda m, x_BTd: m.second(between(m.first(x_BTd).tanh())),
        first=nn.Linear(5, 6),
        second=nn.Linear(6, 3),
    ).double()


ALONE = "a sample alone (has|raises)"


def keep(x):
    return x


@pytest.mark.parametrize(
    ("between", "before", "after", "message"),
    [
        (lambda h: h - h.mean(0), keep, keep, ALONE),
        (lambda h: h.flip(0), keep, keep, ALONE),
        (lambda h: h + h.transpose(0, 1).mean(2, keepdim=True), keep, keep, ALONE),
        (keep, lambda x: x.transpose(0, 1), keep, r"first\.weight: .* sample has another norm"),
        # The norms of the batch are in another order than its losses.
        (keep, lambda x: x.roll(1, 0), lambda losses: losses.roll(-1, 0), r"first\.weight"),
    ],
    ids=["mixed", "permuted", "swapped", "batch second", "permutation undone"],
)
def test_samples_that_do_not_stay_apart_are_found(between, before, after, message, way) -> None:
    model = build_around(between)
    clipping = way(model, 0.1)
    x = torch.randn(4, 4, 5, dtype=torch.float64)
    samples = 1 if between is keep and after is keep else 0  # the axis of the output

    def losses_of(x):
        return after(model(before(x)).square().sum((1 - samples, 2)))

    with pytest.raises(WrongTrainingError, match=message) as caught:
        clipping.check(losses_of, x)
    assert not re.search(r"\d\.\d|sample \d", str(caught.value))
    details = caught.value.details
    assert details is None or re.search(r"sample \d: .+|sample \d is \d+\.\d+ alone", details)


def test_a_layer_that_trains_on_a_part_is_found() -> None:
    class Part(nn.Linear):
        def forward(self, x):
            whole = super().forward(x)
            return torch.cat([whole[:1], whole[1:].detach()])

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), Part(6, 3)).double()
    clipping = BookKeeping(model, 0.1)
    with pytest.raises(WrongTrainingError, match="gradient of the batch's loss is not that of"):
        clipping.check(partial(squares, model), draw())


def build_dropping(**checkpointing):
    """Dropout under checkpointing, which may draw it again."""

    def run(m, x):
        body = nn.Sequential(m.first, nn.Tanh(), m.dropout)
        return m.second(checkpoint(body, x, **{"use_reentrant": False} | checkpointing))

    layers = {"first": nn.Linear(5, 6), "second": nn.Linear(6, 3), "dropout": nn.Dropout(0.5)}
    return Composed(run, **layers).double()


def draw():
    return torch.randn(3, 4, 5).double()


def test_dropout_stays_as_it_is(way) -> None:
    model = build_dropping()
    clipping, masks = way(model, 0.1), []
    model.dropout.register_forward_hook(lambda *given: masks.append((given[2] == 0).any()))
    checked = clipping.check(partial(squares, model), draw())

    assert any(masks)
    assert not all(masks)
    assert checked.max_relative_error < 1e-9
    assert all(module.training for module in model.modules())


def test_dropout_that_is_drawn_again_in_backward_is_found(way) -> None:
    model = build_dropping(preserve_rng_state=False)
    with pytest.raises((WrongTrainingError, RuntimeError), match="preserve_rng_state=True"):
        way(model, 0.1).check(partial(squares, model), draw())


def test_a_model_that_draws_numbers_in_training_is_evaluated() -> None:
    model, x = build_dropping(), draw()
    drop = lambda x: functional.dropout(x, 0.5, model.training)  # noqa: E731
    model.dropout.forward = drop
    clipping = BookKeeping(model, 0.1)
    assert "so it is with dropout on" in clipping.check(partial(squares, model), x).checked
    clipping.remove()

    model.dropout.forward = lambda x: drop(x) - x.mean(0)
    with pytest.raises(WrongTrainingError, match="the model or the loss mixes samples"):
        BookKeeping(model, 0.1).check(partial(squares, model), x)
