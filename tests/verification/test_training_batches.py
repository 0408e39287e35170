"""A check takes a batch as the loop has it, and finds in it what it finds in plain tensors."""

from collections import namedtuple
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from private_loops import BOUND, B, build_mlp, points, points_loss, with_dpprof, with_hooks
from torch import Tensor

from dpprof.private import BookKeeping, WrongTrainingError, check

X, Y = points()
Pair = namedtuple("Pair", "x y")  # noqa: PYI024 (as users write them)


@dataclass(frozen=True)
class Labelled:
    x: Tensor
    y: Tensor
    name: str = "digits"


BATCHES = {
    "nested": ({"a": {"x": X}, "y": Y}, lambda one: (one["a"]["x"], one["y"])),
    "dataclass": (Labelled(X, Y), lambda one: (one.x, one.y)),
    "named tuple": (Pair(X, Y), lambda one: (one.x, one.y)),
    "object": (SimpleNamespace(x=X, deep=[None, (Y, "text")]), lambda one: (one.x, one.deep[1][0])),
    "rows": ([{"x": x, "y": y} for x, y in zip(X, Y, strict=True)], None),
    "words": ({"x": X, "y": Y, "words": ["a"] * B}, lambda one: (one["x"], one["y"])),
}


def read(kind, batch):
    if kind == "rows":
        return (torch.stack([one[name] for one in batch]) for name in ("x", "y"))
    return BATCHES[kind][1](batch)


@pytest.mark.parametrize("kind", BATCHES)
def test_batches_of_any_structure_are_checked(kind) -> None:
    def loss(model, batch):
        x, y = read(kind, batch)
        assert kind != "words" or len(batch["words"]) == len(x)
        return points_loss(model, x, y)

    def mixing(model, batch):
        x, y = read(kind, batch)
        return points_loss(model, x - x.mean(0), y)

    batch = [BATCHES[kind][0]]
    setup = with_dpprof(BookKeeping, build_mlp(), loss)
    found = setup.check(batch)

    assert found.samples == B
    assert found.max_relative_error < 1e-4
    assert "each sample's loss is its own" in found.checked
    with pytest.raises(WrongTrainingError, match="the model or the loss mixes samples"):
        setup._replace(loss=mixing).check(batch)


@pytest.mark.parametrize("looks_up", [True, False], ids=["fails", "is another one"])
def test_weights_as_many_as_samples_are_named(looks_up) -> None:
    def loss(model, x, y, weights):
        own = weights[y.argmax(1)] if looks_up else weights.sum()
        return points_loss(model, x, y) * own

    setup = with_dpprof(BookKeeping, build_mlp(), loss)
    with pytest.raises(
        WrongTrainingError, match=r"depends on all 4 entries of batch\[2\]: the model"
    ):
        setup.check((X, Y, torch.arange(1.0, B + 1)))
    assert setup.check((X, Y, torch.arange(1.0, B + 2))).samples == B


def weighted(model, x, y, weights):
    return points_loss(model, x, y) * weights.sum()


def test_parts_of_another_length_belong_to_all_samples() -> None:
    setup = with_dpprof(BookKeeping, build_mlp(), weighted)
    batch = (X, Y, torch.ones(7))
    assert "each sample's loss is its own" in setup.check(batch).checked

    twice = setup._replace(loss=lambda *given: weighted(*given) / B ** (len(given[1]) > 1))
    with pytest.raises(WrongTrainingError, match="the mean over the batch is taken twice"):
        twice.check(batch)

    mixing = setup._replace(loss=lambda m, x, y, w: weighted(m, x - x.mean(0), y, w))
    with pytest.raises(WrongTrainingError, match="the model or the loss mixes samples"):
        mixing.check(batch)

    mean = with_hooks(build_mlp(), lambda *given: weighted(*given).mean())
    with pytest.raises(ValueError, match=r"parts of \[4, 7\] entries; let loss return one loss"):
        mean.check(batch)


def test_nodes_of_all_graphs_are_told() -> None:
    nodes, of_graph = torch.randn(9, 5), torch.tensor([0, 0, 1, 1, 2, 2, 3, 3, 3])

    def loss(model, graphs):
        x = torch.zeros(len(graphs["y"]), 5).index_add(0, graphs["of"], graphs["nodes"])
        return points_loss(model, x, graphs["y"])

    setup = with_dpprof(BookKeeping, build_mlp(), loss)
    found = setup.check({"nodes": nodes, "of": of_graph, "edges": torch.zeros(2, 6), "y": Y})

    assert found.unchecked["each sample alone"].startswith(
        "batch[0]['nodes'] has no entry for each"
    )
    assert "the gradient is that of single samples, clipped" in found.checked


def test_a_batch_that_may_be_read_in_two_ways_is_refused() -> None:
    setup = with_dpprof(BookKeeping, build_mlp(), lambda m, batch: points_loss(m, *batch["pair"]))
    assert setup.check({"pair": [X, Y]}).samples == B
    with pytest.raises(ValueError, match=r"batch\[0\]\['pair'\] has 2 entries that are as long"):
        setup.check({"pair": [X[:2], Y[:2]]})


def test_nothing_that_has_samples_is_refused() -> None:
    model = build_mlp()
    with pytest.raises(ValueError, match="at least two samples, samples first, and is nothing"):
        check(model, lambda m, text: m(X) + len(text), "text", BookKeeping(model, BOUND))


def test_a_batch_that_refers_to_itself_is_refused() -> None:
    model, batch = build_mlp(), SimpleNamespace(x=X, y=Y)
    batch.whole = batch
    with pytest.raises(ValueError, match="an object of the batch refers to itself"):
        check(model, lambda m, one: points_loss(m, one.x, one.y), batch, BookKeeping(model, BOUND))
