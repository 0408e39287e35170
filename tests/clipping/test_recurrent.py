"""Recurrent layers are clipped exactly: PyTorch's, their cells, and Opacus's."""

import copy
import functools
import itertools

import pytest
import torch
from opacus.layers import DPGRU, DPLSTM, DPRNN
from opacus.layers.dp_rnn import DPLSTMCell, DPRNNBase
from products import one_in
from small_models import (
    FLAT,
    assert_exact,
    assert_exact_in_every_way,
    assert_excluded,
    default_dtype,
    gradients,
    is_clear,
)
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from dpprof.private import BookKeeping, PerLayerClipping, UnsupportedError

B = T = 4  # of the same length: nothing may depend on lengths
D, H = 3, 5
KINDS = (nn.LSTM, nn.GRU, nn.RNN, DPLSTM, DPGRU, DPRNN)
FORMS = ({}, {"num_layers": 2, "bidirectional": True}, {"bias": False})
WITH_PROJECTION = {"num_layers": 2, "bidirectional": True, "proj_size": 2}
CASES = [
    *one_in(5, KINDS, FORMS, (True, False), (True, False)),
    *itertools.product([nn.LSTM], [WITH_PROJECTION], (True, False), (True, False)),
    (nn.RNN, {"nonlinearity": "relu"}, True, False),
]


def draw_states(model, rows: int):
    """First states, samples first, (B, rows, size) each."""
    sizes = [getattr(model, "proj_size", 0) or H, H][: 1 + ("LSTM" in type(model).__name__)]
    return [torch.randn(B, rows, size, dtype=torch.float64) for size in sizes]


def losses_of(model, x, lengths, *states, packed: bool):
    """Losses that depend on every output; states and samples in the order of the batch."""
    first = model.batch_first
    given = x if first else x.transpose(0, 1)
    if packed:
        given = pack_padded_sequence(given, lengths, batch_first=first, enforce_sorted=False)
    turned = tuple(state.transpose(0, 1).contiguous() for state in states)
    y, last = model(given, turned if len(turned) > 1 else turned[0])
    if packed:
        y, _ = pad_packed_sequence(y, batch_first=True, total_length=T)
    y = y if first or packed else y.transpose(0, 1)
    of_last = sum(one.double().pow(3).sum((0, 2)) for one in tree_leaves(last))
    return y.square().sum((1, 2)) + of_last


@pytest.mark.parametrize(("kind", "form", "batch_first", "packed"), CASES)
def test_every_layer_is_exact(kind, form, batch_first, packed) -> None:
    is_opacus = kind in KINDS[3:]
    rounds = packed and is_opacus  # last states of packed sequences
    with default_dtype(torch.float64 if rounds else torch.float32):
        model = kind(D, H, batch_first=batch_first, **form).double()
        x = torch.randn(B, T, D, dtype=torch.float64)
        rows = model.num_layers * (1 + model.bidirectional)
        batch = x, torch.tensor([2, 4, 1, 3]), *draw_states(model, rows)
        run = functools.partial(losses_of, model, packed=packed)
        if is_opacus:
            for way in FLAT:
                assert_exact(way, model, batch, run, tolerance=1e-10).remove()
                model.zero_grad()
        else:
            assert_exact_in_every_way(model, batch, run)


def draw():
    return torch.randn(B, T, D, dtype=torch.float64)


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_a_cell_that_is_used_for_each_step_is_exact(kind, way) -> None:
    cell = kind(D, H).double()

    def run(x):
        state, losses = None, 0
        for x_t in x.unbind(1):
            state = cell(x_t, state)
            losses = losses + tree_leaves(state)[0].square().sum(1)
        return losses

    assert_exact(way, cell, (draw(),), run, tolerance=1e-10)


def test_a_layer_that_is_used_twice_frozen_in_part_and_checkpointed_is_exact(way) -> None:
    model = nn.LSTM(D, D, 2).double()
    model.weight_hh_l0.requires_grad_(False)
    model.bias_ih_l1.requires_grad_(False)

    def run(x):
        y, last = checkpoint(model, x.transpose(0, 1), use_reentrant=False)
        return model(y.tanh(), last)[0].square().sum((0, 2))

    assert_exact(way, model, (draw(),), run, tolerance=1e-10)


@pytest.mark.parametrize("kind", [nn.LSTM, DPLSTM])
def test_dropout_is_differentiated_as_it_was_drawn(kind) -> None:
    model = kind(D, H, 2, dropout=0.5, batch_first=True).double()
    clipping = BookKeeping(model, 1e9)
    x = torch.randn(1, T, D, dtype=torch.float64)

    def loss():
        torch.manual_seed(1)
        return model(x)[0].square().sum((1, 2))

    clipping.backward(loss())
    moved = [(p, p.detach().clone(), 1e-5 * torch.randn_like(p)) for p in model.parameters()]
    found = []
    with torch.no_grad():
        for sign in (1, -1):
            for p, value, change in moved:
                p.copy_(value + sign * change)
            found.append(float(loss()))
    expected = sum(float((p.grad * change).sum()) for p, _, change in moved)
    assert (found[0] - found[1]) / 2 == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("kind", [nn.GRU, DPLSTM])
def test_a_batch_without_samples_leaves_nothing(kind) -> None:
    model = kind(D, H, batch_first=True)
    clipping = BookKeeping(model, 1.0)
    y, _ = model(torch.zeros(0, T, D))
    clipping.backward(y.sum((1, 2)))
    assert y.shape == (0, T, H)
    assert is_clear(model)


def test_a_sample_that_is_not_finite_is_excluded_alone() -> None:
    model, x = nn.LSTM(D, H).double(), draw()
    run = lambda x: model(x.transpose(0, 1))[0].square().sum((0, 2))  # noqa: E731
    x[0, 1] = torch.nan
    assert_excluded(BookKeeping, model, (x,), run, at=0)


def test_bfloat16_autocast_runs_in_bfloat16() -> None:
    model, x = nn.LSTM(D, H), torch.randn(B, T, D)
    plain = model(x.transpose(0, 1))[0]
    clipping = BookKeeping(model, 1e9)
    with torch.autocast("cpu", torch.bfloat16):
        y = model(x.transpose(0, 1))[0]
    assert y.dtype == torch.bfloat16
    assert torch.allclose(y.float(), plain, atol=0.02)
    clipping.backward(y.float().square().sum((0, 2)))
    clipped = gradients(model)
    clipping.remove()
    model.zero_grad()
    model(x.transpose(0, 1))[0].square().sum().backward()
    assert (clipped - gradients(model)).norm() < 0.03 * clipped.norm()


def test_autocast_returns_the_dtype_that_pytorch_returns() -> None:
    model, x = nn.LSTM(D, H), torch.randn(T, B, D)
    with torch.autocast("cpu", torch.bfloat16):
        try:
            plain = model(x)[0]
        except RuntimeError:
            pytest.skip("PyTorch has no LSTM in bfloat16 on this processor")
        BookKeeping(model, 1.0)
        assert model(x)[0].dtype == plain.dtype


def test_a_copy_is_a_plain_layer() -> None:
    model, x = nn.GRU(D, H), torch.randn(T, B, D)
    clipping = BookKeeping(model, 1.0)
    copied = copy.deepcopy(model)
    assert type(copied) is nn.GRU
    assert torch.allclose(copied(x)[0], model(x)[0])
    clipping.remove()
    assert torch.equal(copied(x)[0], model(x)[0])


class Outputs(nn.LSTM):
    def forward(self, x):
        return super().forward(x)[0].tanh()


def test_a_subclass_may_call_the_layer_by_super() -> None:
    model = Outputs(D, H, batch_first=True).double()
    assert_exact(BookKeeping, model, (draw(),), lambda x: model(x).square().sum((1, 2)))


@pytest.mark.parametrize(
    ("kind", "what"), [(DPLSTM, "two layers"), (nn.LSTMCell, "more than once")]
)
def test_per_layer_refuses_what_it_would_clip_in_parts(kind, what) -> None:
    model = kind(D, H)
    x, state = torch.randn(B, D), (torch.zeros(B, H),) * 2
    with pytest.raises((UnsupportedError, RuntimeError), match=what):
        PerLayerClipping(model, 1.0).backward(model(x, model(x, state))[0].sum(1))


class Cell(DPLSTMCell):
    def forward(self, *inputs):
        h, c = super().forward(*inputs)
        return h * 2, c


@pytest.mark.parametrize(
    ("model", "inputs", "what"),
    [
        (nn.LSTM(D, H), (torch.zeros(T, D),), "LSTM gets no batch"),
        (nn.GRUCell(D, H), (torch.zeros(D),), "GRUCell gets no batch"),
        (nn.GRU(D, H), (torch.zeros(T, B, D), torch.zeros(1, 1, H)), "first states"),
        (nn.LSTM(D, H), (torch.zeros(T, B, D), (torch.zeros(1, B, H),)), "first states"),
        (DPRNNBase(Cell, D, H), (torch.zeros(T, B, D),), "no rule for cells of Cell"),
    ],
)
def test_what_has_no_samples_or_no_rule_is_refused(model, inputs, what) -> None:
    BookKeeping(model, 1.0)
    with pytest.raises((ValueError, UnsupportedError), match=what):
        model(*inputs)


def test_a_weight_that_is_computed_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="weight_hh_l0_g that its rule does not know"):
        BookKeeping(nn.utils.weight_norm(nn.LSTM(D, H), "weight_hh_l0"), 1.0)


def test_an_input_that_changes_before_backward_is_refused() -> None:
    model, x = nn.LSTM(D, H), torch.randn(T, B, D)
    clipping = BookKeeping(model, 1.0)
    losses = model(x)[0].square().sum((0, 2))
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        clipping.backward(losses)
