"""Models that mix samples, or put another axis first, are refused on the first batch."""

from functools import partial

import pytest
import torch
from small_models import EVERY, FLAT, Composed, each_of, is_clear, squares
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from dpprof.predict.memory.recorder import Recorder
from dpprof.predict.memory.timeline import MemoryTimeline
from dpprof.private import BookKeeping, UnsupportedError
from dpprof.private.errors import BatchAxisError
from dpprof.private.graph.first_batch import TRIES

way = each_of(EVERY)

B = T = 4
D = 6
MIXED = "depends on what .* computed for another"
AXIS = r"saw another axis than samples first"


def between(function):
    """Code between two trained layers."""
    layers = {"first": nn.Linear(D, D), "second": nn.Linear(D, D)}
    return Composed(lambda m, x_BTd: m.second(function(m.first(x_BTd).tanh())), **layers)


def time_first(model):
    """Run a model whose first axis is time."""
    return Composed(lambda m, x_BTd: m.model(x_BTd.transpose(0, 1)).transpose(0, 1), model=model)


def recur(m, x_TBd):
    """As PyTorch's recurrent networks are by default: (T, B, d)."""
    inputs = m.inside(x_TBd)
    state, states = torch.zeros_like(inputs[0]), []
    for one in inputs:
        state = (one + state).tanh()
        states.append(state)
    return m.across(torch.stack(states))


def look_up(m, x_BTd):
    """Relative positions, looked up once for all samples, as in T5."""
    places = torch.arange(T)
    bias_TT = m.bias(places[:, None] - places + T)[:, :, 0]
    return bias_TT.softmax(1) @ m.linear(x_BTd)


def run_on_grid(m, x_BTd):
    """(H, W, B, d), as some vision models have it."""
    grid = x_BTd[:, :, None].expand(-1, -1, 3, -1).permute(1, 2, 0, 3)
    return m.linear(grid).mean(1).transpose(0, 1)


def attend_over_samples(h):
    return functional.scaled_dot_product_attention(*[h.transpose(0, 1)] * 3).transpose(0, 1)


def straight_through(h):
    mean = h.mean(0)
    return h + mean - mean.detach()


def linear():
    return nn.Linear(D, D)


MODELS = {
    "centred over samples": (lambda: between(lambda h: h - h.mean(0)), MIXED),
    "rolled": (lambda: between(lambda h: h.roll(1, 0)), MIXED),
    "attention over samples": (lambda: between(attend_over_samples), MIXED),
    "batch statistics": (lambda: between(lambda h: (h - h.mean(0)) / h.std(0)), MIXED),
    "the largest of the batch": (lambda: between(lambda h: h / h.abs().max()), MIXED),
    "a shared cache": (lambda: between(lambda h: h.cumsum(0)), MIXED),
    "mixed for gradients alone": (lambda: between(straight_through), MIXED),
    "tokens and samples swapped": (lambda: between(lambda h: h + h.transpose(0, 1)), MIXED),
    "positions looked up once": (
        lambda: Composed(look_up, linear=linear(), bias=nn.Embedding(2 * T, 1)),
        MIXED,
    ),
    "a recurrent network, time first": (
        lambda: time_first(Composed(recur, inside=linear(), across=linear())),
        AXIS,
    ),
    "a linear layer, time first": (lambda: time_first(linear()), AXIS),
    "a grid first": (lambda: Composed(run_on_grid, linear=linear()), AXIS),
}


@pytest.mark.parametrize("name", MODELS)
def test_it_is_refused_by_name_each_time_until_it_is_trusted(name, way) -> None:
    make, message = MODELS[name]
    model, x = make(), torch.randn(B, T, D)
    clipping = way(model, 0.5)
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=message):
            clipping.backward(squares(model, x))
        assert is_clear(model)
    clipping.remove()

    way(model, 0.5, first_batch="trusted").backward(squares(model, x))


def mix_by_contrast(model, x):
    z = model(x).flatten(1)
    return functional.cross_entropy(z @ z.T, torch.arange(len(z)), reduction="none")


def mix_by_scale(model, x):
    losses = squares(model, x)
    return losses / losses.sum()


@pytest.mark.parametrize("loss", [mix_by_contrast, mix_by_scale])
def test_a_loss_that_mixes_is_refused(loss, way) -> None:
    model = nn.Sequential(linear(), nn.Tanh(), linear())
    clipping = way(model, 0.5)
    with pytest.raises(UnsupportedError, match="loss of a sample depends on what 2 computed"):
        clipping.backward(loss(model, torch.randn(B, T, D)))


@pytest.mark.parametrize("name", ["rolled", "a recurrent network, time first"])
@pytest.mark.parametrize("reentrant", [False, True])
def test_it_is_refused_under_checkpointing_too(name, reentrant, way) -> None:
    model, x = MODELS[name][0](), torch.randn(B, T, D, requires_grad=True)
    run = lambda x: checkpoint(model, x, use_reentrant=reentrant)  # noqa: E731
    with pytest.raises(UnsupportedError, match=MODELS[name][1]):
        way(model, 0.5).backward(squares(run, x))


def test_a_single_sample_waits_for_the_next_larger_batch(way) -> None:
    model = between(lambda h: h - h.mean(0))
    clipping = way(model, 0.5)
    clipping.backward(squares(model, torch.randn(1, T, D)))
    assert not clipping.first_batch_verified
    clipping.backward(torch.zeros(0))
    with pytest.raises(UnsupportedError, match=MIXED):
        clipping.backward(squares(model, torch.randn(B, T, D)))


def test_what_a_matrix_of_zeros_hides_at_first_is_found_later(way) -> None:
    model = between(lambda h: h - h.mean(0))
    nn.init.zeros_(model.second.weight)
    clipping = way(model, 0.5)
    x = torch.randn(B, T, D)
    clipping.backward((model(x) - 1).square().sum((1, 2)))
    assert not clipping.first_batch_verified
    model.zero_grad()
    nn.init.ones_(model.second.weight)
    with pytest.raises(UnsupportedError, match=MIXED):
        clipping.backward((model(x) - 1).square().sum((1, 2)))


def test_a_layer_without_a_gradient_is_waited_for_some_batches(way) -> None:
    model = nn.Sequential(nn.Linear(D, D), nn.Linear(D, D))
    nn.init.zeros_(model[1].weight)
    clipping, looks = way(model, 0.5), []
    for _ in range(TRIES + 1):
        looks.append(clipping.first_batch_verified)
        clipping.backward(squares(model, torch.randn(B, T, D)))
        model.zero_grad()
    assert looks == [False] * TRIES + [True]


@pytest.mark.parametrize("reorder", [partial(torch.flip, dims=[0]), partial(torch.roll, shifts=1)])
def test_a_graph_that_begins_to_reorder_samples_later_is_refused(reorder, way) -> None:
    orders = [lambda x: x]
    model = between(lambda h: orders[-1](h.clone()))
    x = torch.randn(2, T, D)  # no half is itself in another order
    clipping = way(model, 1.0)
    clipping.backward(squares(model, x))
    model.zero_grad()
    orders.append(reorder)
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=MIXED):
            clipping.backward(reorder(squares(model, x)))


def put(y, order):
    return torch.zeros_like(y).index_put((order,), y)


def write_rows(y, order):
    other = torch.zeros_like(y)
    for place, row in zip(order.tolist(), y, strict=True):
        other[place] = row
    return other


BACK = {
    "index": lambda y, order: y[order.argsort()],
    "index of the second axis": lambda y, order: y[None][:, order.argsort()][0],
    "put": put,
    "rows": write_rows,
    "gather": lambda y, order: y.gather(0, order.argsort()[:, None].expand_as(y)),
    "copy": lambda y, order: torch.zeros_like(y).index_copy(0, order, y),
    "scatter": lambda y, order: torch.zeros_like(y).scatter(0, order[:, None].expand_as(y), y),
    "scatter add": lambda y, order: torch.zeros_like(y).scatter_add(
        0, order[:, None].expand_as(y), y
    ),
    "checkpoint": lambda y, order: checkpoint(lambda y: y[order.argsort()], y, use_reentrant=False),
    "behind no rule": lambda y, order: torch.cdist(y[:, None], torch.ones(1, 1, D))[:, 0][
        order.argsort()
    ],
    "product": lambda y, order: torch.eye(len(y))[order.argsort()] @ y,
    "compiled": torch.compile(lambda y, order: y[order.argsort()], backend="aot_eager"),
}


@pytest.mark.parametrize("back", BACK)
def test_samples_that_a_later_batch_sorts_and_puts_back_are_refused(back, way) -> None:
    """While lengths are alike, the order is the batch's, and the first batch shows nothing."""

    def sort(x, lengths):
        order = lengths.argsort(descending=True, stable=True)
        return (BACK[back](model[0](x[order]), order) + model[1](x)).square().sum(1)

    model, x = nn.ModuleList([linear(), linear()]), torch.randn(6, D)
    clipping = way(model, 1.0)
    for _ in range(2):
        clipping.backward(sort(x, torch.full((6,), 7)))
        model.zero_grad()
    for lengths in ([7, 7, 9, 7, 7, 8], [7, 7, 7, 7, 7, 8], [7, 7, 8, 7, 7, 7]):
        with pytest.raises((UnsupportedError, BatchAxisError)):
            clipping.backward(sort(x, torch.tensor(lengths)))
        assert is_clear(model)


def test_that_each_batch_is_verified_is_said_once(way, caplog) -> None:
    model = between(lambda h: torch.cdist(h, torch.ones(1, D)).expand_as(h))
    clipping = way(model, 1.0)
    for _ in range(3):
        clipping.backward(squares(model, torch.randn(B, T, D)))
        model.zero_grad()
    [message] = caplog.messages
    assert "stops at Cdist, so each batch is verified, by two more backward passes" in message


def test_one_loss_that_depends_on_one_other_sample_is_always_seen(way) -> None:
    for seed in range(10):
        torch.manual_seed(seed)
        model = between(lambda h: torch.cat([h[1:2], h[:1], h[2:]]))
        with pytest.raises(UnsupportedError):
            way(model, 1.0).backward(squares(model, torch.randn(8, T, D)))


@pytest.mark.parametrize("turn", [torch.transpose, lambda h, *axes: torch.roll(h, 1, axes[0])])
def test_code_that_turns_another_axis_later_is_refused(turn, way) -> None:
    axes = [(1, 2)]
    model = between(lambda h: turn(h, *axes[-1]))
    x = torch.randn(2, D, D)
    clipping = way(model, 1.0)
    clipping.backward(squares(model, x))
    model.zero_grad()
    axes.append((0, 1))
    with pytest.raises(UnsupportedError):
        clipping.backward(squares(model, torch.randn(D, D, D)))


def test_samples_that_are_not_finite_do_not_stand_in_its_way(way) -> None:
    model = nn.Sequential(linear(), nn.Tanh(), linear())
    clipping = way(model, 0.5)
    x = torch.randn(B, T, D)
    x[2] = torch.nan
    clipping.backward(squares(model, x))
    assert clipping.first_batch_verified
    assert clipping.nonfinite_samples == 1

    clipping.remove()
    clipping = way(model, 0.5)
    clipping.backward(squares(model, torch.full((B, T, D), torch.nan)))
    assert not clipping.first_batch_verified


def test_a_step_draws_and_computes_what_it_does_without(way) -> None:
    def step(first_batch):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(D, D), nn.Dropout(0.5), nn.Linear(D, D))
        clipping = way(model, 0.5, first_batch=first_batch)
        x = torch.randn(B, T, D)
        y = checkpoint(model, x, use_reentrant=False, preserve_rng_state=True)
        clipping.backward(y.square().sum((1, 2)))
        return [*(p.grad for p in model.parameters()), clipping.sample_norms, torch.get_rng_state()]

    for one, other in zip(step("verified"), step("trusted"), strict=True):
        assert torch.equal(one, other)


def test_another_word_is_refused() -> None:
    with pytest.raises(ValueError, match=r"first_batch must be one of .*'trusted'.* is 'no'"):
        BookKeeping(nn.Linear(2, 2), 1.0, first_batch="no")


def peaks(way, first_batch: str, wide: int, samples: int, tokens: int) -> list[int]:
    """The peaks of three steps."""
    torch.manual_seed(0)
    blocks = [(nn.Linear(wide, wide), nn.LayerNorm(wide), nn.GELU()) for _ in range(4)]
    model = nn.Sequential(*(layer for block in blocks for layer in block))
    clipping = way(model, 0.5, first_batch=first_batch)
    x, found = torch.randn(samples, tokens, wide), []
    for _ in range(3):
        with Recorder(is_there=lambda tensor, _: not tensor.is_meta) as recorder:
            clipping.backward(squares(model, x))
            model.zero_grad()
        found.append(MemoryTimeline(recorder, {}, (0, len(recorder.events))).peak_bytes)
    return found


@pytest.mark.parametrize("way", FLAT)
def test_the_first_steps_peak_rises_by_a_layers_gradients_and_later_ones_not(way) -> None:
    sizes = {"wide": 64, "samples": 8, "tokens": 32}
    verified, trusted = (peaks(way, one, **sizes) for one in ("verified", "trusted"))
    of_a_layer = 4 * 64 * 8 * 32

    assert verified[1:] == trusted[1:]
    assert verified[0] <= trusted[0] + of_a_layer


class Interleaved(nn.Module):
    """Puts samples into another order where their number is even."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x):
        count, halves = len(x), 2 - len(x) % 2
        hidden = self.first(x).view(halves, count // halves, 4).transpose(0, 1).softmax(-1)
        return self.last(hidden.view(count, 4))[:, 0].square()


def test_another_cut_of_the_batch_is_another_graph() -> None:
    model = Interleaved()
    clipping = BookKeeping(model, 1.0)
    for count in (3, 5):
        clipping.backward(model(torch.randn(count, 4)))
    with pytest.raises(BatchAxisError, match="another order"):
        clipping.backward(model(torch.randn(6, 4)))
