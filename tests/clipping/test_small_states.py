"""Optimizers with small states under ``NoisyOptimizer``: in 8 bits, and factored."""

import copy
import io

import pytest
import torch
from small_models import one_by_one
from torch import nn

from dpprof.private.engine.book_keeping import BookKeeping
from dpprof.private.noise.optimizer import NoisyOptimizer

bitsandbytes = pytest.importorskip("bitsandbytes")
OPTIMIZERS = [bitsandbytes.optim.AdamW8bit, torch.optim.Adafactor]
BATCH, BOUND = 4, 0.5


class Run:
    """A private training of a matrix that is large enough for 8 bits, and of a vector."""

    def __init__(self, make, noise_multiplier: float = 0.0) -> None:
        torch.manual_seed(0)
        self.model = nn.Linear(64, 128)
        self.x = torch.randn(BATCH, 64)
        self.clipping = BookKeeping(self.model, BOUND)
        self.optimizer = NoisyOptimizer(
            make(self.model.parameters(), lr=0.01),
            self.clipping,
            noise_multiplier=noise_multiplier,
            expected_batch_size=BATCH,
            generator=torch.Generator().manual_seed(1),
        )

    def step(self, count: int = 1) -> "Run":
        for _ in range(count):
            self.clipping.backward(self.losses(self.x))
            self.optimizer.step()
            self.optimizer.zero_grad()
        return self

    def losses(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x).square().sum(1)


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_step_applies_the_clipped_mean_as_the_optimizer_alone_would(make) -> None:
    run = Run(make)
    plain = copy.deepcopy(run.model)
    optimizer = make(plain.parameters(), lr=0.01)
    for _ in range(2):
        _, total, _ = one_by_one(lambda x: plain(x).square().sum(1), plain, (run.x,), BOUND)
        parts = total.float().split([p.numel() for p in plain.parameters()])
        for parameter, part in zip(plain.parameters(), parts, strict=True):
            parameter.grad = part.view_as(parameter) / BATCH
        optimizer.step()
        optimizer.zero_grad()
        run.step()

    for ours, theirs in zip(run.model.parameters(), plain.parameters(), strict=True):
        # Rounding of a gradient may move a moment to the next of its 256 values.
        assert (ours - theirs).abs().max() <= 2e-4


def test_moments_of_large_matrices_take_8_bits_and_small_ones_32() -> None:
    run = Run(OPTIMIZERS[0]).step()
    weight, bias = (run.optimizer.state[p] for p in run.model.parameters())

    assert weight["state1"].dtype is weight["state2"].dtype is torch.uint8
    assert bias["state1"].dtype is torch.float32


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_step_without_noise_is_refused(make) -> None:
    run = Run(make)
    run.clipping.backward(run.losses(run.x))

    with pytest.raises(RuntimeError, match="was asked to step on gradients without noise"):
        run.optimizer.original_optimizer.step()


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_run_that_is_resumed_ends_with_the_same_bits(make) -> None:
    whole, stopped, resumed = (Run(make, noise_multiplier=1.0) for _ in range(3))
    whole.step(4)
    stopped.step(2)
    file = io.BytesIO()
    torch.save([stopped.model.state_dict(), stopped.optimizer.state_dict()], file)
    file.seek(0)
    model, optimizer = torch.load(file, weights_only=True)
    resumed.model.load_state_dict(model)
    resumed.optimizer.load_state_dict(optimizer, exact=True)
    resumed.step(2)

    for one, other in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(one, other)
