"""What flash clipping holds beside ghost clipping, as recorded, at lengths that matter."""

import pytest
import torch
from factory import make_experiment
from torch import nn

from dpprof.devices.cpu import Cpu
from dpprof.instruments.memory import TimelineRecorder, record_timelines, tracing
from dpprof.instruments.setup import make_batch
from dpprof.memory.timeline import MemoryTimeline
from dpprof.norms.tiles import WORKSPACE_BYTES
from dpprof.records.terms import COMPONENTS
from dpprof.spec import registry

MIB = 2**20


def keep(method: str, layers: list[nn.Module], B: int, T: int) -> MemoryTimeline:
    """Record a step of some layers, without running it."""
    experiment = make_experiment(method=method, batch_size=B, seq_len=T)
    with tracing(None) as recorder:
        model = nn.Sequential(*[build() for build in layers])
        step = registry.load("methods", method)(model, experiment)
        step.attach_optimizer(torch.optim.SGD(step.module.parameters(), lr=0.1))
        timeline_recorder = TimelineRecorder(recorder, step, lambda _: None)
        return record_timelines(timeline_recorder, make_batch(model, Cpu(), experiment), 2)[1]


def most(step: MemoryTimeline, *components: str) -> int:
    """The most that components held together while norms were computed."""
    rows = [row for row, phase in enumerate(step.phases) if phase == "backward"]
    columns = [COMPONENTS.index(name) for name in components]
    return int(step.balances[rows][:, columns].sum(axis=1).max())


LONG = [
    lambda: nn.Embedding(8, 1024),
    lambda: nn.Linear(1024, 1024, bias=False),
    lambda: nn.Linear(1024, 8, bias=False),
]


def test_ghost_norms_of_long_sequences_take_whole_gram_matrices() -> None:
    ghost = keep("opacus-ghost", LONG, B=2, T=4096)

    assert most(ghost, "gram_matrices") >= 2 * 2 * 4096 * 4096 * 4  # 256 MiB


@pytest.mark.parametrize("method", ["flash", "flash-bk", "per-layer"])
def test_norms_of_long_sequences_take_no_more_than_the_workspace(method) -> None:
    step = keep(method, LONG, B=2, T=4096)

    assert 0 < most(step, "gram_matrices", "workspace") <= WORKSPACE_BYTES + MIB <= 16 * MIB


def test_tiles_of_gram_matrices_are_told_as_gram_matrices() -> None:
    B, T, tile = 2, 256, 128
    layers = [lambda: nn.Embedding(8, 1024), lambda: nn.Linear(1024, 1024, bias=False)]
    both = 2 * B * tile * tile * 4

    assert both <= most(keep("flash", layers, B=B, T=T), "gram_matrices") <= both + 1024


def test_a_long_sequence_in_four_layers_peaks_at_a_fraction_of_ghosts() -> None:
    layers = [lambda: nn.Embedding(512, 512), *[lambda: nn.Linear(512, 512)] * 4]
    ghost = keep("opacus-ghost", layers, B=1, T=8192)

    for method in ("flash", "flash-bk"):
        assert keep(method, layers, B=1, T=8192).peak_bytes <= 0.6 * ghost.peak_bytes


@pytest.mark.parametrize(("B", "T"), [(1, 2048), (4, 512), (16, 64)])
def test_flash_peaks_no_higher_than_ghost(B, T) -> None:
    layers = [
        lambda: nn.Embedding(300, 64),
        lambda: nn.LayerNorm(64),
        lambda: nn.Linear(64, 256),
        nn.GELU,
        lambda: nn.Linear(256, 64),
        lambda: nn.Linear(64, 300, bias=False),
    ]
    ghost, flash = (keep(method, layers, B=B, T=T) for method in ("opacus-ghost", "flash"))

    assert flash.peak_bytes <= 1.05 * ghost.peak_bytes
