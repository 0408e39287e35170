"""Figures drawn of invented results."""

import itertools

import pytest
from factory import (
    PRIVACY,
    make_capacity,
    make_experiment,
    make_kernels,
    make_manifest,
    make_memory,
    make_noise,
    write_synthetic,
    write_synthetic_ceilings,
)

from dpprof.analysis.advice.budget import Planned
from dpprof.analysis.collection import collect
from dpprof.analysis.tables.build import build_tables
from dpprof.planning.planner import Manifest
from dpprof.records.ceilings import ceilings_path, device_name
from dpprof.spec import registry

FIGURES = registry.names("figures")

TYPICAL = ("breakdown", "tradeoff", "seq-len")
"""Figures with bars, with points and with lines."""


METHODS = ("standard", "opacus-ghost")

OWNED = {"parameters": 2**20, "optimizer_state": 2**21, "unattributed": 2**19}

WATCHED = ("clean", "phases", "memory", "kernels")

GROWTH = {"batch-size", "seq-len", "cost"}

TRACED = {("forward", "gemm"): 0.02, ("step", "optimizer"): 0.01}


def tables_of(root, methods=METHODS, batch_sizes=(2, 4), seq_lens=(4, 8), **fields):
    axes = [
        {"method": method, "batch_size": batch, "seq_len": length}
        for method, batch, length in itertools.product(methods, batch_sizes, seq_lens)
    ]
    experiments = [make_experiment(**fields) for fields in axes]
    predicted = [make_experiment(**fields, device="cuda", target="h200") for fields in axes]
    for position, experiment in enumerate(experiments):
        measured = {"step_s": (0.01 * (position + 1),)} | fields
        write_synthetic(root, experiment, **measured)
        write_synthetic(
            root,
            experiment,
            instrument="phases",
            peak_allocated_bytes=2**22 + position,
            phases_s={"forward": [0.01], "backward": [0.02], "step": [0.001]},
            **measured,
        )
        write_synthetic(
            root, experiment, instrument="memory", recorded=make_memory(OWNED), **measured
        )
        traced = make_kernels(TRACED, idle_s=0.005)
        write_synthetic(root, experiment, instrument="kernels", kernels=traced, **measured)
    capacities = [e for e in predicted if e.batch_size == batch_sizes[0]]
    for experiment in capacities:
        found = make_capacity()
        write_synthetic(root, experiment, instrument="capacity", recorded=found, **fields)
    for experiment in predicted:
        recorded = make_memory(OWNED)
        write_synthetic(root, experiment, instrument="estimate", recorded=recorded, **fields)
    runs = [make_manifest((e, 0), instrument=i).runs for e in experiments for i in WATCHED]
    runs += [make_manifest((e, 0), instrument="estimate").runs for e in predicted]
    runs += [make_manifest((e, 0), instrument="capacity").runs for e in capacities]
    manifest = Manifest(runs=tuple(itertools.chain.from_iterable(runs)))
    ceilings = write_synthetic_ceilings(root)
    known = [ceilings_path(root, device_name(ceilings.device))]
    planned = Planned(PRIVACY, {float(length): make_noise(length) for length in seq_lens})
    return build_tables(collect(manifest, root, ceilings=known, partial=False), planned)


def draw(name, tables):
    return registry.load("figures", name)(tables)


def texts_of(figure) -> list[str]:
    """Return the texts of a figure that name methods."""
    figure.draw_without_rendering()
    texts = [text for legend in figure.legends for text in legend.get_texts()]
    texts += [text for axis in figure.axes for text in (axis.title, *axis.texts)]
    texts += [label for axis in figure.axes for label in axis.get_yticklabels()]
    return [text.get_text() for text in texts]


def typical_first():
    """Return every figure; only the typical ones are drawn by default."""
    slow = pytest.mark.slow
    return [pytest.param(name, marks=() if name in TYPICAL else slow) for name in FIGURES]
