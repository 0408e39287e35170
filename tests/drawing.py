"""Figures drawn of invented results."""

import itertools

import pytest
from factory import (
    PRIVACY,
    make_capacity,
    make_experiment,
    make_kernels,
    make_memory,
    make_noise,
    make_predicted_time,
    tables_of_runs,
)

from dpprof.experiments.config import registry
from dpprof.experiments.config.parallel import Parallel
from dpprof.results.analysis.advice.budget import Planned

FIGURES = registry.names("figures")

TYPICAL = ("breakdown", "tradeoff", "seq-len")
"""Figures with bars, with points and with lines."""


METHODS = ("standard", "opacus-ghost")

OWNED = {"parameters": 2**20, "optimizer_state": 2**21, "unattributed": 2**19}

GROWTH = {"batch-size", "seq-len", "cost"}

TRACED = {("forward", "gemm"): 0.02, ("step", "optimizer"): 0.01}


def tables_of(root, methods=METHODS, batch_sizes=(2, 4), seq_lens=(4, 8), **fields):
    recorded, traced = make_memory(OWNED), make_kernels(TRACED, idle_s=0.005)
    runs = []
    product = itertools.product(methods, batch_sizes, seq_lens)
    for position, (method, batch, length) in enumerate(product):
        axes = {"method": method, "batch_size": batch, "seq_len": length}
        experiment = make_experiment(**axes)
        measured = {"step_s": (0.01 * (position + 1),)} | fields
        phases = {"forward": [0.01], "backward": [0.02], "step": [0.001]}
        phases = {"peak_allocated_bytes": 2**22 + position, "phases_s": phases}
        predicted = make_experiment(**axes, device="cuda", target="h200")
        runs += [
            (experiment, "clean", measured),
            (experiment, "phases", phases | measured),
            (experiment, "memory", {"recorded": recorded} | measured),
            (experiment, "kernels", {"kernels": traced} | measured),
            (predicted, "estimate", {"recorded": recorded} | fields),
        ]
        if batch == batch_sizes[0]:
            ranks = Parallel(kind="fsdp", world_size=2)
            on_two = predicted.model_copy(update={"parallel": ranks})
            foretold = recorded | {"time": make_predicted_time(0.01)}
            runs += [
                (predicted, "capacity", {"recorded": make_capacity()} | fields),
                (on_two, "capacity", {"recorded": make_capacity()} | fields),
                (experiment, "estimate", {"recorded": foretold} | fields),
            ]
    planned = Planned(PRIVACY, {float(length): make_noise(length) for length in seq_lens})
    return tables_of_runs(root, *runs, ceilings={}, planned=planned)


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
