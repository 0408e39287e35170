"""What flash clipping holds beside ghost clipping, as recorded, at lengths that matter."""

from collections.abc import Callable

import pytest
from factory import make_experiment
from memory_steps import MODEL, B, P, T, keep, record_and_estimate
from torch import nn

from dpprof.experiments.records.terms import COMPONENTS
from dpprof.predict.memory.timeline import MemoryTimeline
from dpprof.private import UnsupportedError
from dpprof.private.norms.tiles import WORKSPACE_BYTES

MIB = 2**20


def trace(method: str, layers: list[Callable[[], nn.Module]], B: int, T: int) -> MemoryTimeline:
    """Record a step of some layers, without running it."""

    def build() -> nn.Module:
        return nn.Sequential(*[build_one() for build_one in layers])

    return keep(method, build, fake=True, batch_size=B, seq_len=T)


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


def test_norms_of_long_sequences_take_no_more_than_the_workspace() -> None:
    """Those of ghost clipping take whole Gram matrices."""
    ghost = trace("opacus-ghost", LONG, B=2, T=4096)
    assert most(ghost, "gram_matrices") >= 2 * 2 * 4096 * 4096 * 4  # 256 MiB
    for method in ("flash", "flash-bk", "per-layer"):
        step = trace(method, LONG, B=2, T=4096)
        assert 0 < most(step, "gram_matrices", "workspace") <= WORKSPACE_BYTES + MIB <= 16 * MIB


def test_tiles_of_gram_matrices_count_as_gram_matrices() -> None:
    B, T, tile = 2, 256, 128
    layers = [lambda: nn.Embedding(8, 1024), lambda: nn.Linear(1024, 1024, bias=False)]
    both = 2 * B * tile * tile * 4

    assert both <= most(trace("flash", layers, B=B, T=T), "gram_matrices") <= both + 1024


FOUR = [lambda: nn.Embedding(512, 512), *[lambda: nn.Linear(512, 512)] * 4]
MIXED = [
    lambda: nn.Embedding(300, 64),
    lambda: nn.LayerNorm(64),
    lambda: nn.Linear(64, 256),
    nn.GELU,
    lambda: nn.Linear(256, 64),
    lambda: nn.Linear(64, 300, bias=False),
]


@pytest.mark.parametrize(
    ("layers", "B", "T", "share"),
    [(FOUR, 1, 8192, 0.6), (MIXED, 1, 2048, 1.05), (MIXED, 16, 64, 1.05)],
)
def test_flash_peaks_no_higher_than_ghost_and_far_below_at_long_sequences(
    layers, B, T, share
) -> None:
    ghost, flash = (trace(method, layers, B=B, T=T) for method in ("opacus-ghost", "flash"))

    assert flash.peak_bytes <= share * ghost.peak_bytes
    if layers is FOUR:
        assert trace("flash-bk", layers, B=B, T=T).peak_bytes <= share * ghost.peak_bytes


@pytest.mark.parametrize(
    ("method", "noise", "dtype"),
    [
        ("flash-bk", "banded-4", "float32"),
        pytest.param("flash", "bisr-2", "float32", marks=pytest.mark.slow),
        pytest.param("per-layer", "banded-3", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_past_noise_is_in_the_books_and_predicted_to_the_byte(method, noise, dtype) -> None:
    """In float32, also of parameters in 16 bits."""
    formats = dict.fromkeys(("dtype", "parameters_dtype", "trained_dtype"), dtype)
    settings = {"model": MODEL, "method": method, "batch_size": B, "seq_len": T} | formats
    correlated, _ = record_and_estimate(make_experiment(**settings, noise_strategy=noise))
    independent, _ = record_and_estimate(make_experiment(**settings))

    kept = (int(noise[-1]) - 1) * 4 * P
    peaks = [each.memory.peak_allocated_bytes for each in (correlated, independent)]
    assert peaks[0] - peaks[1] == kept
    noises = [each.memory.at_peak.components["noise"] for each in (correlated, independent)]
    assert noises[0] - noises[1] == kept


def test_a_method_with_noise_of_its_own_refuses_correlated_noise() -> None:
    with pytest.raises(UnsupportedError, match="does not run with noise_strategy banded-4"):
        keep("opacus-hooks", noise_strategy="banded-4")
