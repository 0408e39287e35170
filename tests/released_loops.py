"""A private loop whose releases are recorded, on data with a sample that is far from the others."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
from one_call import seeded
from releases import Run, record
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim import SGD
from torch.utils.data import DataLoader

from dpprof.private import make_private

SAMPLES, BATCH, STEPS, D = 24, 6, 8, 5
RATE, BOUND, NOISE = BATCH / SAMPLES, 0.5, 1.0
CANARY = 3


def build(*, has_statistics: bool = False) -> nn.Module:
    """Build a model, with a batch norm or without."""
    norm = nn.BatchNorm1d(12) if has_statistics else nn.Identity()
    return nn.Sequential(nn.Linear(D, 12), norm, nn.Tanh(), nn.Linear(12, 6)).double()


def draw(*, has_canary: bool = True) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Draw inputs, targets, and whether a sample is there; the canary is far off, or is not."""
    generator = seeded(1)
    samples = [
        (torch.randn(D, generator=generator).double(), torch.ones(6).double(), torch.tensor(1.0))
        for _ in range(SAMPLES)
    ]
    x, y, there = samples[CANARY]
    samples[CANARY] = (100 * x, -50 * y, there) if has_canary else (0 * x, 0 * y, 0 * there)
    return samples


def losses_of(model: nn.Module, x: Tensor, y: Tensor, is_there: Tensor) -> Tensor:
    """Compute one loss for each sample, 0 for one that is not there."""
    return (model(x) - y).square().mean(1) * is_there


def train(
    model: nn.Module, samples: Any, *, seed: int = 3, resumes_after: int = 0, **options: Any
) -> dict[str, Any]:
    """Train by ``make_private``, as its documents show; returns what may be published beside."""
    is_replica = distributed.is_initialized() and not isinstance(model, FSDPModule)
    trained = nn.parallel.DistributedDataParallel(model) if is_replica else model
    compute = partial(losses_of, trained)

    def begin(noise: int) -> Any:
        loader = DataLoader(samples, batch_size=BATCH, shuffle=True)
        given = {"max_grad_norm": BOUND, "noise_multiplier": NOISE, "check": False}
        given |= {"noise_generator": seeded(noise), "sampling_generator": seeded(2)} | options
        made = make_private(trained, SGD(model.parameters(), lr=0.1), loader, compute, **given)
        samples.drawn.clear()  # which ranks compared
        return made

    private = begin(seed)
    while private.optimizer.steps < STEPS:
        for batch in private.data_loader:
            private.optimizer.backward(compute, *batch)
            private.optimizer.step()
            private.optimizer.zero_grad()
            if private.optimizer.steps == resumes_after and private.optimizer.is_last_part:
                state, resumes_after = private.state_dict(exact=True), 0
                private.remove()
                private = begin(0)
                private.load_state_dict(state, exact=True)
                break
    if not isinstance(model, FSDPModule):
        Path("out").mkdir()
        torch.save(private.state_dict(), "out/state.pt")
    private.remove()
    return {"guarantee": private.guarantee}


def build_shards() -> nn.Module:
    """Build the model, and shard it over all ranks."""
    model = build()
    fully_shard(model[0])
    return fully_shard(model)


def record_rank(folder: Path, *, shards: bool, has_canary: bool, seed: int, noise: float) -> Run:
    """Record a training on this rank."""
    own = folder / str(distributed.get_rank())
    training = partial(train, seed=seed, noise_multiplier=noise)
    make = build_shards if shards else build
    return record(make, training, draw(has_canary=has_canary), own)
