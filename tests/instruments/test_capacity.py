"""The largest batch, found by few estimates, and true by the instrument that would tell."""

import pytest
from factory import make_experiment

from dpprof.instruments import capacity, memory
from dpprof.instruments.capacity import search
from dpprof.spec.registry import UnsupportedError

MODEL = {"vocab_size": 50, "d_model": 16, "layers": 1, "heads": 2}
TARGET = {"memory_bytes": "1GiB", "flops_per_s": 1e12, "bandwidth_bytes_per_s": 1e11}


def bent(batch: int) -> int:
    """The highest of three straight lines."""
    return max(1000 + 2 * batch, 500 + 10 * batch, 37 * batch)


@pytest.mark.parametrize("budget", [1002, 1100, 1500, 2500, 9999, 123_456])
def test_the_answer_is_that_of_trying_every_batch(budget) -> None:
    asked = []

    def peak(batch: int) -> int:
        asked.append(batch)
        return bent(batch)

    found = search(peak, budget, {}, most=5000)

    assert found == max(batch for batch in range(1, 5001) if bent(batch) <= budget)
    assert len(asked) == len(set(asked)) <= 12


def test_a_second_search_asks_only_for_what_is_new() -> None:
    known: dict[int, int] = {}
    search(bent, 9999, known)
    asked = []
    search(lambda batch: asked.append(batch) or bent(batch), 9000, known)

    assert not set(asked) & {1, 2}
    assert all(known[batch] == bent(batch) for batch in known)


@pytest.mark.parametrize("most", [1, 2, 777])
def test_the_search_ends_where_it_is_told_to(most) -> None:
    assert search(lambda _: 5, 10, {}, most=most) == most


def test_not_even_one() -> None:
    assert search(lambda batch: 100 + batch, 100, {}) is None


@pytest.mark.parametrize(
    "method", [pytest.param("opacus-hooks", marks=pytest.mark.slow), "opacus-ghost"]
)
def test_the_answers_batch_fits_by_estimate_and_one_more_does_not(method) -> None:
    fields = {"model": MODEL, "method": method, "seq_len": 32, "target": TARGET}
    fields |= {"device": "cuda", "memory_limit_bytes": 80 * 2**20}
    found = capacity.measure(make_experiment(**fields), lambda _: None)
    told = found.capacity

    def predict(batch_size: int) -> int:
        experiment = make_experiment(**fields, batch_size=batch_size)
        return memory.estimate(experiment, lambda _: None).memory.peak_allocated_bytes

    assert told.limited_by == "memory"
    assert predict(told.batch_size) == told.peak_bytes <= 80 * 2**20
    assert predict(told.batch_size + 1) == told.next_peak_bytes > 80 * 2**20
    assert predict(told.safe_batch_size) == told.safe_peak_bytes <= 72 * 2**20
    assert found.memory.peak_allocated_bytes == told.safe_peak_bytes
    assert found.compute.executed_flops > 0


def test_one_at_a_time_needs_three_estimates() -> None:
    fields = {"model": MODEL, "method": "microbatch", "seq_len": 64, "target": TARGET}
    fields |= {"device": "cuda"}
    found = capacity.measure(make_experiment(**fields), lambda _: None).capacity
    five = memory.estimate(make_experiment(**fields, batch_size=5), lambda _: None)
    three = memory.estimate(make_experiment(**fields, batch_size=3), lambda _: None)

    assert found.extrapolated
    assert found.limited_by == "search"
    slope = (five.memory.peak_allocated_bytes - three.memory.peak_allocated_bytes) / 2
    assert found.peak_bytes == pytest.approx(
        three.memory.peak_allocated_bytes + slope * (capacity.MOST - 3), rel=0.01
    )


def test_a_model_too_large_for_one_sample_says_so() -> None:
    experiment = make_experiment(
        model="small", target=TARGET, device="cuda", memory_limit_bytes="100MiB", seq_len=64
    )
    with pytest.raises(
        MemoryError, match=r"small with standard needs \d+ MiB for one sample of 64"
    ):
        capacity.measure(experiment, lambda _: None)


def test_a_gpu_that_nobody_knows_needs_a_target(monkeypatch) -> None:
    monkeypatch.setattr(memory, "visible_gpus", list)
    with pytest.raises(UnsupportedError, match="give a target"):
        capacity.measure(make_experiment(device="cuda"), lambda _: None)
