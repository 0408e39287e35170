"""What the definition of correct does with samples that are not finite, or not there."""

import pytest
import torch
from steps import flat_gradient, prepare

from dpprof.methods.training_step import Batch

SETTINGS = {"batch_size": 3, "seq_len": 4, "dtype": "float64", "max_grad_norm": 0.5}
POISONED = 15


def gradient_of(batch, noise, **poison):
    step, _ = prepare("microbatch", **SETTINGS, noise_multiplier=noise)
    with torch.no_grad():
        step.module.token_embedding.weight[POISONED] = poison.get("value", 0.0)
    step.compute_gradient(batch, lambda _: None)
    return flat_gradient(step.module)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_sample_that_is_not_finite_adds_nothing(value) -> None:
    tokens = torch.arange(12).reshape(3, 4)
    labels = tokens + 1
    others = Batch(tokens[1:], labels[1:])
    tokens = tokens.clone()
    tokens[0, 0] = POISONED
    found = gradient_of(Batch(tokens, labels), 0.0, value=value)

    assert found.norm() > 0
    torch.testing.assert_close(found, gradient_of(others, 0.0, value=value), rtol=0, atol=0)


def test_a_batch_without_samples_leaves_noise_alone() -> None:
    nothing = Batch(*torch.empty(2, 0, 4, dtype=torch.int64))

    assert gradient_of(nothing, 0.0).count_nonzero() == 0
    # 1,176 values: one standard error is 2 %.
    assert gradient_of(nothing, 2.0).std().item() == pytest.approx(2.0 * 0.5 / 3, rel=0.1)
