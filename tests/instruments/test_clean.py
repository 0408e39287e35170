from types import SimpleNamespace

import pytest
from factory import make_experiment
from fresh_process import run_fresh

from dpprof.experiments.records.result import Measurement
from dpprof.measure.instruments import opening
from dpprof.measure.instruments.clean import measure


@pytest.fixture(scope="module")
def ghost() -> Measurement:
    experiment = make_experiment(method="opacus-ghost", warmup_steps=2, timed_steps=3, batch_size=4)
    return measure(experiment, lambda _: None)


def test_raw_samples_are_kept_and_the_median_is_theirs(ghost) -> None:
    assert len(ghost.time.warmup_step_s) == 2
    assert len(ghost.time.step_s) == 3
    assert ghost.time.median_s == sorted(ghost.time.step_s)[1]
    assert all(step > 0 for step in ghost.time.step_s)
    assert ghost.throughput.steps_per_s == pytest.approx(1 / ghost.time.median_s)
    assert ghost.throughput.samples_per_s == pytest.approx(4 / ghost.time.median_s)
    assert ghost.throughput.tokens_per_s == pytest.approx(4 * 4 / ghost.time.median_s)


def test_what_the_process_reads_and_writes_is_counted_over_the_timed_steps(ghost) -> None:
    assert ghost.host_io.steps == 3
    assert 0 <= ghost.host_io.bytes_read < 2**20
    assert 0 <= ghost.host_io.storage_bytes_written < 2**20


def test_what_was_counted_before_is_taken_off() -> None:
    kinds = ("read_chars", "write_chars", "read_bytes", "write_bytes")
    before, after = (
        SimpleNamespace(**dict(zip(kinds, counts, strict=True)))
        for counts in ((1_000, 50, 4_096, 0), (1_700, 80, 8_192, 512))
    )
    counted = opening.count_io(SimpleNamespace(io_counters=lambda: after), before, 7)

    assert counted.model_dump() == {
        "bytes_read": 700,
        "bytes_written": 30,
        "storage_bytes_read": 4_096,
        "storage_bytes_written": 512,
        "steps": 7,
    }


def test_a_system_that_counts_nothing_gives_null_and_a_reason(monkeypatch) -> None:
    monkeypatch.setattr(opening, "read_counts", lambda _: None)
    measured = measure(make_experiment(), lambda _: None)

    assert measured.host_io is None
    assert measured.reasons["host_io"] == "the operating system does not count it for a process"


def test_energy_is_null_without_a_counter(ghost) -> None:
    assert ghost.energy is None
    assert "CPU" in ghost.reasons["energy"]


def test_clean_observes_itself(ghost) -> None:
    assert ghost.observed.step_s == ghost.time.median_s
    assert ghost.observed.peak_rss_bytes == ghost.memory.peak_rss_bytes > 50 * 2**20


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float32", "tf32"])
def test_cuda_counters_are_the_allocators(dtype: str) -> None:
    measured = measure(make_experiment(method="opacus-hooks", device="cuda", dtype=dtype), print)
    snapshots = {snapshot.name: snapshot for snapshot in measured.memory.snapshots}

    assert measured.reasons == {}
    assert snapshots["model_loaded"].allocated_bytes >= 1176 * 4
    assert measured.memory.peak_allocated_bytes >= snapshots["after_backward"].allocated_bytes
    assert measured.memory.peak_reserved_bytes >= measured.memory.peak_allocated_bytes


@pytest.mark.slow
def test_no_library_is_taken_for_memory_of_the_training() -> None:
    code = """
from factory import make_experiment
from dpprof.measure.instruments.clean import measure
for s in measure(make_experiment(), lambda _: None).memory.snapshots:
    print(s.name, s.rss_bytes)
"""
    rss = {name: int(size) for name, size in map(str.split, run_fresh(code).splitlines())}

    # A model of 1,176 parameters; importing torch._dynamo alone would be 70 MiB.
    assert rss["optimizer_created"] - rss["model_loaded"] < 8 * 2**20
