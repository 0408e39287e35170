"""A loop that holds logits is told what that costs, and another is not."""

import re
import warnings

import pytest
import torch
from torch import nn
from torch.nn import functional

from dpprof.measure.monitor import Monitor
from dpprof.measure.monitor.monitor import LogitsWatch

TOKENS, WIDTH, VOCABULARY = 64, 8, 5000
MIB = TOKENS * VOCABULARY * 4 / 2**20


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self) -> dict[str, torch.Tensor]:
        logits = self.head(torch.ones(TOKENS, WIDTH))
        labels = torch.zeros(TOKENS, dtype=torch.int64)
        return {"logits": logits, "loss": functional.cross_entropy(logits, labels)}


def test_a_loop_that_keeps_its_output_is_warned_once_with_the_bytes() -> None:
    model, monitor = Model(), Monitor(flops_profile_freq=1)

    def run() -> None:
        for _ in range(2):
            with monitor.step(samples=1, tokens=TOKENS):
                out = model()
                out["loss"].backward()

    with pytest.warns(UserWarning, match=re.escape(f"{MIB:,.0f} MiB of logits are kept")) as told:
        run()
    assert len(told) == 1
    assert "loss = model(...).loss frees them" in str(told[0].message)


def test_a_loop_that_takes_the_loss_alone_is_not_warned() -> None:
    model, monitor = Model(), Monitor(flops_profile_freq=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            with monitor.step(samples=1, tokens=TOKENS):
                loss = model()["loss"]
                loss.backward()


def test_logits_that_two_losses_read_are_counted_once() -> None:
    watch = LogitsWatch()
    with watch:
        logits = nn.functional.linear(torch.ones(TOKENS, WIDTH), torch.ones(VOCABULARY, WIDTH))
        for label in range(2):
            functional.cross_entropy(logits, torch.full((TOKENS,), label))

    assert str(watch.tell_held()).startswith(f"{MIB:,.0f} MiB")
    assert round(MIB) == 1
