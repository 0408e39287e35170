import pytest

from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.planning import job_resources
from dpprof.system.hardware import Gpu


def experiment(**keys) -> Experiment:
    required = {"model": "tiny", "method": "standard", "batch_size": 1, "seq_len": 8}
    return Experiment.model_validate({"device": "cpu"} | required | keys)


@pytest.mark.parametrize(
    ("keys", "megabytes"),
    [
        ({}, 16_000),
        ({"device": "cuda"}, 32_000),
        ({"memory_limit_bytes": 2**30}, 16_000),
        ({"memory_limit_bytes": 64 * 2**30}, 69_536),
        ({"parallel": "kind=ddp,world_size=4"}, 28_000),
        ({"memory_limit_bytes": 2**33, "parallel": "kind=ddp,world_size=4"}, 48_768),
    ],
)
def test_a_measurement_is_given_its_limit_and_room_for_libraries(keys, megabytes: int) -> None:
    assert job_resources.host_memory_mb(experiment(**keys)) == megabytes


@pytest.mark.parametrize(("timeout_s", "minutes"), [(1, 14), (600, 33), (3600, 133)])
def test_waiting_and_both_attempts_end_within_the_runtime(timeout_s: float, minutes: int) -> None:
    assert job_resources.runtime_minutes(experiment(timeout_s=timeout_s)) == minutes


H100, A100 = ("H100", 80 * 2**30), ("A100", 40 * 2**30)


@pytest.mark.parametrize(
    ("kinds", "limit", "at_once"),
    [
        ([], None, 1),
        ([], 4, 1),
        ([H100] * 4, None, 4),
        ([H100] * 4, 2, 2),
        ([H100] * 2, 8, 2),
        ([H100, A100, H100], None, 2),
        ([H100] * 2, 0, 2),
    ],
)
def test_as_many_run_at_once_as_there_are_gpus_like_the_first(
    monkeypatch, kinds, limit, at_once: int
) -> None:
    gpus = [Gpu(f"GPU-{number}", *kind) for number, kind in enumerate(kinds)]
    monkeypatch.setattr("dpprof.system.hardware.visible_gpus", lambda: gpus)

    assert job_resources.gpus_at_once(limit) == at_once
