"""A training whose batches differ: the peak and time of each, and what a run of them reserves.

A loader that groups samples by length makes batches of different lengths; Poisson sampling makes
batches of different sizes. What the allocator keeps of one batch seldom suits the next, so a run
reserves more than its largest batch alone: batches are played one after the other, in random order.
"""

import importlib
import math
import random
from collections.abc import Callable, Iterator
from functools import partial
from itertools import pairwise
from typing import Any

from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.varying import share_lengths
from dpprof.experiments.records.result import Measurement
from dpprof.experiments.records.varied import Varied, VariedBatch
from dpprof.predict.memory.allocator_replay import Footprint, replay
from dpprof.predict.memory.caching_allocator import OutOfMemoryError
from dpprof.subjects.models.blocks import NotAlikeError

STEPS = 1_000  # how many are played
_SHARE = 0.99  # of the steps that a percentile is of
_QUANTILES = (0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 0.9999)
"""A Poisson-sampled batch counts as the next larger of the batches at these, which are traced."""

Predict = Callable[[int, int], tuple[Footprint, Measurement]]  # of a batch's samples and tokens


def vary(experiment: Experiment, least: int, predict: Predict) -> tuple[Varied, dict[str, str]]:
    """Predict a training whose batches differ, and say why a figure of it is not known.

    ``least`` is the smallest batch that the method takes.
    """
    lengths = experiment.lengths or ((experiment.seq_len, 1.0),)
    shapes = [
        (size, length, of_length * of_size)
        for length, of_length in share_lengths(lengths)
        for size, of_size in _find_sizes(experiment, least)
    ]
    predicted = [predict(size, length) for size, length, _ in shapes]
    footprints = [footprint for footprint, _ in predicted]
    batches = []
    limit: int | None = None
    for (size, length, share), (_, measured) in zip(shapes, predicted, strict=True):
        memory, time = measured.memory, measured.time
        assert memory is not None
        assert memory.peak_allocated_bytes is not None
        batch = VariedBatch(
            batch_size=size,
            seq_len=length,
            share=share,
            peak_bytes=memory.peak_allocated_bytes,
            step_s=time and time.predicted_step_s and time.predicted_step_s.median,
        )
        batches.append(batch)
        limit = None if memory.allocator is None else memory.allocator.limit_bytes
    if limit is None:
        why = "PyTorch's CPU allocator has no pool of blocks"
        return Varied(batches=batches), {"varied.reserved_p99_bytes": why}
    shares = [batch.share for batch in batches]
    order = random.Random(experiment.seed).choices(range(len(shapes)), shares, k=STEPS)  # noqa: S311 (no secret)
    play = partial(replay, footprints, order, empty_cache_every=experiment.empty_cache_every)
    try:
        reserved = sorted(play())
    except NotAlikeError as error:
        return Varied(batches=batches), {"varied.reserved_p99_bytes": str(error)}
    try:
        play(limit_bytes=limit)
        fits = True
    except OutOfMemoryError:
        fits = False
    return Varied(
        batches=batches,
        steps=STEPS,
        reserved_mean_bytes=round(sum(reserved) / STEPS),
        reserved_p99_bytes=reserved[math.ceil(_SHARE * STEPS) - 1],
        reserved_most_bytes=reserved[-1],
        expandable_reserved_bytes=max(play(expandable=True)),
        fits=fits,
    ), {}


def _find_sizes(experiment: Experiment, least: int) -> Iterator[tuple[int, float]]:
    """Yield the sizes of batches that are traced, each with the share of those it stands for."""
    if not experiment.poisson:
        yield experiment.batch_size, 1.0
        return
    special: Any = importlib.import_module("scipy.special")  # slow to import, and seldom needed
    mean = experiment.batch_size
    sizes = sorted({max(least, math.ceil(special.pdtrik(share, mean))) for share in _QUANTILES})
    within = [0.0, *(float(special.pdtr(size, mean)) for size in sizes[:-1]), 1.0]
    yield from zip(sizes, (high - low for low, high in pairwise(within)), strict=True)
