"""FLOPs that a step has to compute, in models small enough to add up by hand."""

import pytest
from torch import nn

from dpprof.predict.flops.counter import model_flops_per_token


def make(*, shared: bool = False, frozen: bool = False) -> nn.Sequential:
    model = nn.Sequential(nn.Embedding(10, 4), nn.LayerNorm(4), nn.Linear(4, 10))
    if shared:
        model[2].weight = model[0].weight
    model[2].requires_grad_(not frozen)
    return model


@pytest.mark.parametrize(
    ("model", "products"),
    [
        (make(), 6),  # tables, biases and norms cost nothing
        (make(shared=True), 6),  # a head that shares the table's weight is counted once
        (make(frozen=True), 4),  # two products of three
    ],
)
def test_model_flops_by_hand(model, products) -> None:
    found = model_flops_per_token(model, seq_len=32, layers=3, d_model=4)

    assert found == products * 4 * 10 + 12 * 3 * 4 * 32
