"""Norms and clipped sums are those of one sample at a time, for every layer and shape."""

from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from products import one_in
from simulated_graphs import simulated_graphs
from small_models import FLAT, KINDS, Small, assert_exact, draw, gradients, one_by_one, private

from dpprof.private import BookKeeping, CapturedStep
from dpprof.private.norms import linear, scale, table, tiles, triton_ops
from dpprof.private.norms.placement import as_if_on_cuda

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
D, P = 19, 37
PLACES = [*((way, nullcontext) for way in FLAT), (BookKeeping, as_if_on_cuda)]
"""A GPU joins what it keeps of vectors."""


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch) -> None:
    """Tiles so small that every shape has several, and none is a multiple of one."""
    monkeypatch.setattr(linear, "PRODUCT_TILE", (8, 16))
    monkeypatch.setattr(linear, "gram_rows", lambda _: 48)
    monkeypatch.setattr(linear, "GRAM_COLUMNS", 20)
    monkeypatch.setattr(table, "TILE", 48)
    monkeypatch.setattr(table, "TILE_ON_GPU", 48)
    monkeypatch.setattr(tiles, "SQUARED_AT_ONCE", 1000)
    monkeypatch.setattr(scale, "TOKEN_PARTS", 7)
    for module in (linear, triton_ops):  # as on a GPU without Triton
        monkeypatch.setattr(module, "is_fused", lambda _: False)
    for module in (tiles, table):
        monkeypatch.setattr(module, "BATCHES", 1000)
        monkeypatch.setattr(module, "WORKSPACE_BYTES", 2**16)


def build(kind: str, bias: bool, variant: str, dtype: torch.dtype) -> Small:
    torch.manual_seed(0)
    return Small(kind, D, P, bias=bias, variant=variant).to(dtype)


VARIANTS = ("plain", "frozen", "checkpoint")


def cases(count: int, quick: tuple[int, ...], slow: tuple[int, ...]) -> list[Any]:
    """Lengths with every variant and kind, of which one in so many quick ones is tested."""
    every = [pytest.param(*case, marks=pytest.mark.slow) for case in product(slow, VARIANTS, KINDS)]
    return one_in(count, quick, VARIANTS, KINDS) + every


@pytest.mark.parametrize(("T", "variant", "kind"), cases(5, (17, 1, 100), (256, 1000)))
def test_every_layer_at_every_shape(T, variant, kind) -> None:
    kind, bias = kind
    for B in (1, 4):
        ids, labels, weights = draw(B, T)
        exact = build(kind, bias, variant, torch.float64)
        expected = one_by_one(exact.losses, exact, (ids, labels, weights.double()))
        for dtype, tolerance in TOLERANCE.items():
            inputs = ids, labels, weights.to(dtype)
            for way, place in PLACES:
                model, options = build(kind, bias, variant, dtype), {"tolerance": tolerance}
                with place():
                    clipping = assert_exact(way, model, inputs, expected=expected, **options)
                assert B == 1 or clipping.sample_norms[-1] == 0


@pytest.mark.parametrize(("T", "variant", "kind"), cases(8, (17, 1), (100, 256, 1000)))
def test_a_replay_is_exact_for_every_layer_at_every_shape(T, variant, kind, monkeypatch) -> None:
    kind, bias = kind
    ids, labels, weights = draw(5, T)
    inputs = ids, labels, weights.double()
    model = build(kind, bias, variant, torch.float64)
    norms, expected, bound = one_by_one(model.losses, model, inputs)
    for way in FLAT:
        clipping = way(model, bound, first_batch="trusted")
        optimizer = private(clipping, model, lr=0.0)
        with simulated_graphs(monkeypatch):
            step = CapturedStep(model.losses, optimizer, part_size=3)  # of which one is filled up
            for _ in range(3):
                step(*inputs)

        assert step.is_captured
        found = torch.cat([one.flatten() for one in step._replays._graphs._sums])
        assert (found - expected).norm() <= 1e-9 * expected.norm()
        assert (clipping.sample_norms - norms).norm() <= 1e-9 * norms.norm()
        clipping.remove()


def test_joined_sums_of_vectors_are_tensors_of_their_own() -> None:
    model = build("layer norm", True, "plain", torch.float64)
    clipping = BookKeeping(model, 0.5)
    ids, labels, weights = draw(4, 17)
    with as_if_on_cuda():
        clipping.backward(model.losses(ids, labels, weights.double()))
        once = gradients(model)
        clipping.backward(model.losses(ids, labels, weights.double()))  # adds to each
    torch.testing.assert_close(gradients(model), 2 * once)
    assert len({p.grad.untyped_storage().data_ptr() for p in model.parameters()}) == len(
        list(model.parameters())
    )


@pytest.mark.parametrize("rows", [3, 1])
def test_ids_may_be_int32(way, rows) -> None:
    table = torch.nn.Embedding(rows, 2)
    clipping = way(table, 100.0)
    ids = torch.tensor([[0, 0, rows - 1], [0, 0, 0]], dtype=torch.int32)
    clipping.backward(table(ids).sum((1, 2)))
    counts = torch.tensor([[2.0, 0.0, 1.0], [3.0, 0.0, 0.0]] if rows == 3 else [[3.0], [3.0]])
    assert torch.allclose(clipping.sample_norms, (2 * counts.square().sum(1)).sqrt())
    assert torch.equal(table.weight.grad, counts.sum(0)[:, None].expand(rows, 2))
