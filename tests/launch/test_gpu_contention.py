"""What others do on a GPU is recorded, waited for, and told where memory ran out."""

import json
from types import SimpleNamespace

import pytest
from documents import validate
from factory import make_experiment
from fake_gpus import fake_driver

from dpprof.experiments.launch import device_lock, gpu_contention
from dpprof.experiments.launch.device_slots import gpu_slots
from dpprof.experiments.launch.isolated import Ended, Isolation
from dpprof.experiments.launch.supervisor import supervise
from dpprof.experiments.launch.worker_report import WorkerAnswer
from dpprof.experiments.records.result import Failure, Others, read_result
from dpprof.system import hardware

GIB = 2**30
MODELS = {
    "GPU-a": ("NVIDIA H100", 80 * GIB),
    "GPU-b": ("NVIDIA A100", 80 * GIB),
    "GPU-c": ("NVIDIA H100", 80 * GIB),
    "GPU-d": ("NVIDIA H100", 96 * GIB),
}


@pytest.fixture
def gpus(monkeypatch) -> SimpleNamespace:
    """Four GPUs of three kinds; what others hold, and how busy they are, a test sets."""
    state = SimpleNamespace(held=dict.fromkeys(MODELS, 0), load=0, looks=0)

    def list_gpus() -> list[dict]:
        state.looks += 1
        return [
            {"uuid": uuid, "name": name, "memory_bytes": total}
            | {"used_bytes": state.held[uuid], "load": state.load}
            for uuid, (name, total) in MODELS.items()
        ]

    driver = fake_driver(list_gpus)
    for module in (hardware, gpu_contention):
        monkeypatch.setattr(module, "pynvml", driver)
    monkeypatch.setattr(gpu_contention, "SAMPLE_S", 0.0)
    monkeypatch.setattr(device_lock, "_LOOK_S", 0.0)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return state


@pytest.fixture
def run(gpus, monkeypatch, tmp_path):
    """Supervise a run on a GPU whose worker ends as the test says."""

    def supervised(outcome: str = "ok", **fields):
        error = None if outcome == "ok" else Failure(kind="Error", message="CUDA out of memory.")
        report = WorkerAnswer(outcome=outcome, error=error)

        def work(*_, **__) -> Ended[WorkerAnswer]:
            gpus.held["GPU-a"] += GIB  # another process starts meanwhile
            return Ended(report, 0, timed_out=False, output="", wall_s=1.0, others_busy_cores=0.0)

        monkeypatch.setattr(Isolation, "run", work)
        experiment = make_experiment(device="cuda", **fields)
        supervise(experiment, "clean", 0, tmp_path / "x.json", tmp_path / "x.log")
        return read_result(tmp_path / "x.json")

    return supervised


def test_neighbours_of_one_kind_are_one_slot_for_several_ranks(gpus) -> None:
    gpus.held["GPU-c"] = 3 * GIB
    [slot] = gpu_slots(4, 2)

    assert set(slot.locks) == {"cuda-GPU-a", "cuda-GPU-c"}
    assert slot.environment["CUDA_VISIBLE_DEVICES"] == slot.uuid == "GPU-a,GPU-c"
    assert slot.describe()["gpus"] == 2
    assert gpu_contention.look_at(slot.uuid).memory_bytes == 3 * GIB
    assert gpu_slots(4, 3) == []  # the others are of other kinds


def test_others_on_the_gpu_are_recorded_before_and_after_a_run(gpus, run) -> None:
    gpus.held["GPU-a"], gpus.load = 5 * GIB, 37
    attempt = run().attempts[-1]

    told = {"load": 0.37, "processes": 0, "reason": None}
    assert attempt.others_before.model_dump() == {"memory_bytes": 5 * GIB} | told
    assert attempt.others_after.model_dump() == {"memory_bytes": 6 * GIB} | told


def test_a_load_that_the_driver_does_not_tell_is_null_with_the_reason(
    gpus, run, monkeypatch
) -> None:
    driver = gpu_contention.pynvml

    def refuse(_uuid):
        raise driver.NVMLError("Not Supported")

    monkeypatch.setattr(driver, "nvmlDeviceGetUtilizationRates", refuse)
    others = run().attempts[-1].others_before

    assert (others.memory_bytes, others.load, others.reason) == (0, None, "NVML: Not Supported")


def test_on_a_cpu_they_are_null_with_a_reason() -> None:
    others = gpu_contention.look_at(None)

    assert (others.memory_bytes, others.load, others.processes) == (None, None, None)
    assert "not on a GPU" in others.reason


def test_without_nvml_they_are_null_with_a_reason(gpus, monkeypatch) -> None:
    def refuse():
        raise hardware.pynvml.NVMLError

    monkeypatch.setattr(hardware.pynvml, "nvmlInit", refuse)

    assert gpu_contention.look_at("GPU-a") == Others(reason="NVML is not available")


def test_out_of_memory_says_how_much_others_held(gpus, run) -> None:
    gpus.held["GPU-a"] = 60 * GIB
    error = run("oom").error

    assert error.message.endswith(
        "memory.; other processes held 60.00 GiB before it and 61.00 GiB after it"
    )
    assert error.others_bytes == 61 * GIB


def test_nobody_is_waited_for_unless_asked(gpus, run, capsys) -> None:
    gpus.held["GPU-a"] = 60 * GIB
    run()

    assert "waiting" not in capsys.readouterr().err


def test_a_gpu_is_waited_for_until_others_have_left_it(gpus, run, capsys, monkeypatch) -> None:
    gpus.held |= {"GPU-a": 60 * GIB, "GPU-c": 60 * GIB}
    monkeypatch.setattr(
        gpu_contention.time, "sleep", lambda _: gpus.looks > 60 and gpus.held.update({"GPU-a": 0})
    )
    attempt = run(wait_for_idle_gpu_s=600).attempts[-1]

    assert attempt.others_before.memory_bytes == 0
    assert capsys.readouterr().err.count("waiting for others, who hold 60.0 GiB") == 1


def test_who_waits_takes_a_gpu_that_is_idle_already(gpus, run) -> None:
    gpus.held["GPU-a"] = 60 * GIB

    assert run(wait_for_idle_gpu_s=600).device["uuid"] == "GPU-c"


def test_a_gpu_that_others_do_not_leave_is_refused_and_nothing_runs(gpus, run) -> None:
    gpus.held |= {"GPU-a": 60 * GIB, "GPU-c": 60 * GIB}
    result = run(busy_gpu="refuse", wait_for_idle_gpu_s=0.01)

    assert (result.outcome, result.error.kind) == ("unsupported", "BusyGpu")
    assert result.error.message == (
        "others hold 60.0 GiB and 0% of the time of the GPU after a wait of 0.01 s, and busy_gpu "
        "is refuse; once they have left, dpprof forget --outcome unsupported, then snakemake"
    )
    assert [attempt.others_before.memory_bytes for attempt in result.attempts] == [60 * GIB]
    assert gpus.held["GPU-a"] == 60 * GIB  # what runs adds to that


def test_others_who_come_after_a_crash_have_its_second_attempt_refused(gpus, run) -> None:
    gpus.held["GPU-a"] = GIB // 2  # and a GiB more during the first attempt
    result = run("crashed", busy_gpu="refuse")

    assert [attempt.outcome for attempt in result.attempts] == ["crashed", "unsupported"]
    assert (result.outcome, result.error.kind) == ("unsupported", "BusyGpu")


def test_nothing_is_refused_while_dpprof_itself_uses_a_gpu(gpus) -> None:
    gpus.held["GPU-a"] = 60 * GIB
    judge = gpu_contention.judge_use(["GPU-a", "GPU-c"], 0.0, "refuse")

    assert judge(0, 0) == "others, who hold 60.0 GiB and 0% of the time of GPU-a"
    assert judge(0, 0) is not None  # GPU-c is not looked at: its lock is not free
    gpus.held["GPU-c"] = 60 * GIB
    assert judge(0, 0) is not None
    assert judge(1, 1) is None  # all are in use by others, so the last is taken, to be refused


def test_how_long_others_had_counts_from_when_they_were_seen(gpus, monkeypatch) -> None:
    now = SimpleNamespace(s=0.0)
    monkeypatch.setattr(gpu_contention.time, "monotonic", lambda: now.s)
    judge = gpu_contention.judge_use(["GPU-a"], 10.0, "run")
    gpus.held["GPU-a"] = 60 * GIB
    told = []
    for now.s in (100.0, 109.0, 110.0):
        told.append(judge(0, 0) is None)

    assert told == [False, False, True]


def test_only_gpus_like_the_first_are_interchangeable(gpus, monkeypatch) -> None:
    assert [place.uuid for place in gpu_slots(1)] == ["GPU-a", "GPU-c"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,0,2")
    assert [place.uuid for place in gpu_slots(1)] == ["GPU-b"]


def test_to_wait_and_to_refuse_are_part_of_an_id() -> None:
    usual = make_experiment()

    assert make_experiment(busy_gpu="run").id == usual.id
    assert make_experiment(wait_for_idle_gpu_s=60).id != usual.id
    assert make_experiment(busy_gpu="refuse").id != usual.id


def test_a_run_on_a_gpu_fits_the_schema(gpus, run, tmp_path) -> None:
    run("oom")
    validate(json.loads((tmp_path / "x.json").read_text()), "result")
