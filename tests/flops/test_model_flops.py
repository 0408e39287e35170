"""FLOPs that a step has to compute, in models small enough to add up by hand."""

from torch import nn

from dpprof.flops.model_flops import model_flops_per_token

ATTENTION = {"seq_len": 32, "layers": 3, "d_model": 4}
ATTENTION_FLOPS = 12 * 3 * 4 * 32


def test_tables_biases_and_norms_cost_nothing() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.LayerNorm(4), nn.Linear(4, 6))

    assert model_flops_per_token(model, **ATTENTION) == 6 * 4 * 6 + ATTENTION_FLOPS


def test_a_head_that_shares_the_tables_weight_is_counted_once() -> None:
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 10, bias=False))
    model[1].weight = model[0].weight

    assert model_flops_per_token(model, **ATTENTION) == 6 * 4 * 10 + ATTENTION_FLOPS


def test_a_frozen_matrix_costs_two_products_of_three() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 5))
    model[1].requires_grad_(False)

    assert model_flops_per_token(model, **ATTENTION) == 6 * 4 * 6 + 4 * 6 * 5 + ATTENTION_FLOPS
