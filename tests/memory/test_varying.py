"""Trainings whose batches differ: what each needs, and what a run of them reserves."""

import math
from types import SimpleNamespace

import pytest
from factory import make_experiment

from dpprof.ask.estimate import format_estimate
from dpprof.experiments.config import registry
from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.varying import share_lengths
from dpprof.predict.estimate import estimate
from dpprof.predict.memory.allocator_replay import Footprint, replay
from dpprof.predict.memory.caching_allocator import MIB, OutOfMemoryError
from dpprof.predict.memory.events import Allocated, Freed
from dpprof.subjects.models.blocks import NotAlikeError

WEIGHTS = [Allocated(0)]


def step_of(size: int) -> Footprint:
    """Make a training with weights of 100 MiB, and a step that needs ``size`` MiB beside them."""
    return Footprint(WEIGHTS, [Allocated(1), Freed(1)], [100 * MIB, size * MIB])


def leaving(gradient: int, activation: int) -> Footprint:
    """Make one whose step frees the gradient of the step before, and leaves another."""
    sizes = [100 * MIB, gradient * MIB, activation * MIB, gradient * MIB]
    before = [Allocated(0), Allocated(1)]
    return Footprint(before, [Allocated(2), Freed(2), Freed(1), Allocated(3)], sizes)


def test_blocks_of_short_batches_do_not_serve_long_ones() -> None:
    trainings = [step_of(30), step_of(40)]

    def reserved(*order: int, **how: object) -> list[int]:
        return [size // MIB for size in replay(trainings, order, **how)]  # type: ignore[arg-type]

    assert reserved(0, 1, 0) == [130, 170, 170]  # 40 is not cut from 30, which stay
    assert reserved(1, 0, 1) == [140, 140, 140]  # 30 is cut from 40
    assert reserved(0, 1, 0, 1, empty_cache_every=2) == [130, 100, 130, 100]
    assert reserved(0, 1, expandable=True) == [140, 140]
    assert reserved(0, 1, limit_bytes=150 * MIB) == [130, 140]  # the cache is released
    with pytest.raises(OutOfMemoryError):
        reserved(0, 1, limit_bytes=139 * MIB)


def test_a_step_frees_what_another_batch_left() -> None:
    trainings = [leaving(30, 50), leaving(40, 60)]

    reserved = replay(trainings, [0, 1] * 50)
    # Weights, a gradient of each size, the larger activation; nothing more as steps go on.
    assert {size // MIB for size in reserved[2:]} == {reserved[-1] // MIB}
    assert reserved[-1] <= (100 + 30 + 40 + 50 + 60) * MIB


def test_equal_batches_reserve_what_one_does() -> None:
    trainings = [leaving(30, 50), leaving(30, 50)]
    alone = trainings[0].place().peaks.reserved_bytes
    assert replay(trainings, [0, 1, 1, 0])[-1] == alone


def test_steps_that_leave_other_numbers_of_tensors_are_not_played() -> None:
    with pytest.raises(NotAlikeError, match="leave different numbers of tensors"):
        replay([step_of(30), leaving(30, 50)], [0, 1])


def predict(**fields: object):
    return estimate(make_experiment(model="tiny", method="flash-bk", **fields), lambda _: None)


def test_each_length_needs_what_it_needs_alone() -> None:
    on_gpu = {"device": "cuda", "target": "h100", "batch_size": 8}
    whole = predict(lengths="64=1,16=3", seq_len=None, **on_gpu)
    alone = [predict(seq_len=length, **on_gpu) for length in (16, 64)]

    varied = whole.varied
    assert [(batch.seq_len, batch.share) for batch in varied.batches] == [(16, 0.75), (64, 0.25)]
    assert [batch.peak_bytes for batch in varied.batches] == [
        measured.memory.peak_allocated_bytes for measured in alone
    ]
    assert whole.memory.peak_allocated_bytes == alone[1].memory.peak_allocated_bytes
    times = [measured.time.predicted_step_s.median for measured in alone]
    assert varied.mean_step_s == pytest.approx(0.75 * times[0] + 0.25 * times[1])
    assert varied.fits
    assert varied.reserved_p99_bytes <= varied.reserved_most_bytes
    assert varied.reserved_most_bytes >= alone[1].memory.allocator.reserved_bytes
    assert varied.reserved_mean_bytes <= varied.reserved_most_bytes
    asked = make_experiment(model="tiny", method="flash-bk", lengths="64=1,16=3", seq_len=None)
    told = format_estimate(SimpleNamespace(**dict(whole), experiment=asked))
    assert "varied   75.00% of batches: 8 x 16, peak" in told
    assert " GiB reserved after 99 of 100 steps at most (1,000 in random order)" in told


def test_poisson_sampled_batches_have_the_shares_of_the_distribution() -> None:
    whole = predict(poisson=True, batch_size=3, seq_len=16)

    def within(most: int) -> float:
        return sum(math.exp(-3) * 3**size / math.factorial(size) for size in range(most + 1))

    batches = whole.varied.batches
    sizes = [batch.batch_size for batch in batches]
    assert sizes == [1, 2, 3, 4, 5, 8, 11]
    told = [sum(batch.share for batch in batches[:place]) for place in range(1, 7)]
    assert told == pytest.approx([within(size) for size in sizes[:-1]])
    assert sum(batch.share for batch in batches) == pytest.approx(1)
    peaks = [batch.peak_bytes for batch in batches]
    assert peaks == sorted(peaks)
    assert whole.varied.reserved_p99_bytes is None  # a CPU's allocator reserves nothing
    assert "no pool" in whole.reasons["varied.reserved_p99_bytes"]


def test_only_an_estimate_is_of_batches_that_differ() -> None:
    asked = make_experiment(model="tiny", method="flash-bk", lengths={16: 1, 32: 2}, seq_len=None)

    assert registry.why_unsupported(asked, "estimate") is None
    for instrument in ("capacity", "clean", "memory"):
        assert "lengths would vary them" in str(registry.why_unsupported(asked, instrument))


@pytest.mark.parametrize("numbers", [(1, 3, 7, 10), (0.1,) * 10, (1e-9, 3, 1e9)])
def test_an_experiment_that_is_read_again_keeps_its_name(numbers) -> None:
    lengths = {16 * place: number for place, number in enumerate(numbers, 1)}
    asked = make_experiment(lengths=lengths, seq_len=None)

    assert Experiment.model_validate_json(asked.canonical).id == asked.id
    assert make_experiment(lengths=dict(reversed(lengths.items())), seq_len=None).id == asked.id
    assert sum(share for _, share in share_lengths(asked.lengths)) == pytest.approx(1)
