"""Every parameter is clipped to a bound of its own, and the whole sum has sensitivity C."""

import math

import pytest
import torch
from steps import gradient, sample_gradients

METHOD = "opacus-per-layer"


@pytest.mark.parametrize("bound", [1e-2, 3.0, 1e4])
def test_gradient_is_each_parameters_clipped_to_its_share_of_the_bound(bound) -> None:
    fields = {"batch_size": 5, "dtype": "float64", "max_grad_norm": bound, "noise_multiplier": 0}
    per_parameter = sample_gradients(**fields)
    share = bound / math.sqrt(len(per_parameter))
    expected = []
    for gradients in per_parameter:
        factors = [min(1.0, share / (float(one.norm()) + 1e-6)) for one in gradients]
        expected.append(sum(f * one for f, one in zip(factors, gradients, strict=True)) / 5)

    torch.testing.assert_close(
        gradient(METHOD, **fields), torch.cat(expected), rtol=1e-9, atol=1e-12
    )


def test_a_sample_all_of_whose_parameters_are_clipped_contributes_the_bound() -> None:
    fields = {"batch_size": 1, "dtype": "float64", "noise_multiplier": 0, "max_grad_norm": 1e-3}

    assert gradient(METHOD, **fields).norm().item() == pytest.approx(1e-3, rel=1e-3)


def test_it_is_no_flat_clipping() -> None:
    fields = {"batch_size": 5, "dtype": "float64", "noise_multiplier": 0, "max_grad_norm": 0.1}
    flat, per_layer = gradient("microbatch", **fields), gradient(METHOD, **fields)

    assert torch.nn.functional.cosine_similarity(flat, per_layer, dim=0) < 0.99
