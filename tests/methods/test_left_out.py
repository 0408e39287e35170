"""A step tells the samples that it left out, over all steps."""

import math

import pytest
import torch
from steps import prepare


@pytest.mark.parametrize("method", ["flash", "flash-bk", "per-layer"])
def test_samples_that_were_left_out_are_told(method) -> None:
    step, batch = prepare(method, batch_size=4)
    assert step.nonfinite_samples == 0
    batch.tokens_BT[0] = 1
    batch.tokens_BT[1:] = 2
    with torch.no_grad():
        step.module.token_embedding.weight[1] = math.nan
    for count in (1, 2):
        step.run(batch, lambda _: None)

        assert step.nonfinite_samples == count
    assert all(p[2:].isfinite().all() for p in step.module.parameters())
