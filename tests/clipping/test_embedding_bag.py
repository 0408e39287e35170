"""Embedding bags are clipped exactly."""

import pytest
import torch
from products import one_in
from small_models import assert_exact, assert_exact_in_every_way, is_clear
from torch import nn

from dpprof.private import BookKeeping, UnsupportedError

ROWS, D = 7, 3
IDS = torch.tensor([[2, 2, 5, 1], [0, 6, 2, 3], [4, 4, 4, 4], [2, 2, 2, 2]])
LENGTHS = torch.tensor([3, 0, 4, 1])


@pytest.mark.parametrize(
    ("mode", "form", "padding"),
    one_in(
        2,
        *(("sum", "mean", "max", "weighted"), ("rows", "offsets", "with the last"), (None, 2)),
    ),
)
def test_bags_are_exact(mode, form, padding) -> None:
    model = nn.EmbeddingBag(
        *(ROWS, D),
        mode="sum" if mode == "weighted" else mode,
        padding_idx=padding,
        include_last_offset=form == "with the last",
        dtype=torch.float64,
    )
    nn.init.normal_(model.weight)
    weights = torch.rand(4, 4, dtype=torch.float64)

    def run(ids, lengths, weights):
        offsets = None
        if form != "rows":
            is_used = torch.arange(4) < lengths[:, None]
            ids, weights = ids[is_used], weights[is_used]
            ends = torch.cat([torch.zeros(1, dtype=torch.long), lengths.cumsum(0)])
            offsets = ends if form == "with the last" else ends[:-1]
        weights = weights if mode == "weighted" else None
        return model(ids, offsets, per_sample_weights=weights).square().sum(1)

    assert_exact_in_every_way(model, (IDS, LENGTHS, weights), run, bound=0.5)


def test_weights_of_entries_are_differentiated() -> None:
    model = nn.Sequential(nn.Embedding(ROWS, 1), nn.EmbeddingBag(ROWS, D, mode="sum")).double()

    def run(ids):
        weights = model[0](ids)[:, :, 0]
        return model[1](ids, per_sample_weights=weights).square().sum(1)

    assert_exact(BookKeeping, model, (IDS,), run, tolerance=1e-10)


def test_a_batch_without_bags_leaves_nothing() -> None:
    model = nn.EmbeddingBag(ROWS, D)
    clipping = BookKeeping(model, 1.0)
    none = torch.zeros(0, dtype=torch.long)
    clipping.backward(model(none, none).sum(1))
    assert is_clear(model)


@pytest.mark.parametrize(
    ("given", "what"),
    [
        ((IDS[0], None), "one axis and its offsets"),
        ((IDS, torch.tensor([0, 1])), "takes no offsets"),
        ((IDS[0], torch.tensor([1, 2])), "must begin at 0"),
        ((IDS[0], torch.tensor([0, 3, 2])), "must begin at 0"),
        ((IDS[0], torch.tensor([0, 9])), "must begin at 0"),
        ((IDS, None, torch.ones(4, 4)), "need mode='sum'"),
    ],
)
def test_offsets_that_are_none_and_weights_of_a_mean_are_refused(given, what) -> None:
    model = nn.EmbeddingBag(ROWS, D)
    BookKeeping(model, 1.0)
    with pytest.raises(ValueError, match=what):
        model(*given)


@pytest.mark.parametrize("option", ["max_norm", "scale_grad_by_freq", "sparse"])
def test_options_that_mix_samples_are_refused(option) -> None:
    with pytest.raises(UnsupportedError, match=f"with {option} has no exact"):
        BookKeeping(nn.EmbeddingBag(ROWS, D, **{option: True}), 1.0)
