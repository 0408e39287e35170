"""Slots of the processor: disjoint cores, beside one another, and never beside anything else."""

import json
import os
import subprocess
import sys

import pytest
from children import refuse
from factory import make_experiment
from fake_gpus import ROOT, SCRIPT

from dpprof.launch import cpu_slots as module
from dpprof.launch import supervisor
from dpprof.launch.cpu_slots import count_cpu_slots, cpu_slots
from dpprof.launch.device_lock import DeviceBusyError, Hold, hold_one
from dpprof.launch.device_slots import cpu_slot
from dpprof.records.result import read_result
from dpprof.spec.validation import InputError
from dpprof.system.hardware import neighbouring_cores


@pytest.fixture
def cores(monkeypatch) -> None:
    """Seven cores, of which 0 and 4, 1 and 5, and 2 and 6 are threads of one."""
    monkeypatch.setattr(module, "neighbouring_cores", lambda: [0, 4, 1, 5, 2, 6, 3])
    monkeypatch.setattr(supervisor, "available_cores", lambda: 7)


def test_slots_are_disjoint_neighbours_and_what_is_left_over_stays_idle(cores) -> None:
    slots = cpu_slots(3)

    assert [slot.cores for slot in slots] == [(0, 4), (1, 5), (2, 6)]
    described = slots[1].describe()
    assert (described["cores"], described["threads"], described["pinned_to"]) == (2, 2, [1, 5])
    assert {slot.environment["OMP_NUM_THREADS"] for slot in slots} == {"2"}


@pytest.mark.parametrize(
    ("stated", "most", "had"),
    [(None, None, 3), (1, None, 1), (None, 2, 2), (None, 9, 3), (3, 1, 3)],
)
def test_threads_are_those_that_are_stated_else_as_many_as_cores(cores, stated, most, had) -> None:
    assert {slot.describe()["threads"] for slot in cpu_slots(2, stated, most)} == {had}


def test_who_states_more_threads_than_a_slot_has_cores_gets_the_whole_processor(cores) -> None:
    assert cpu_slots(2, stated=4) == []
    (slot,) = supervisor._slots(make_experiment(cpu_threads=4), "clean", None, 2)
    assert slot.locks == {"cpu": Hold.ALONE}


@pytest.mark.parametrize("instrument", ["estimate", "capacity"])
def test_predictions_and_gpus_have_no_slots(cores, instrument) -> None:
    (slot,) = supervisor._slots(make_experiment(), instrument, None, 2)

    assert slot.cores == ()


def test_the_cores_are_those_that_this_process_may_use() -> None:
    assert sorted(neighbouring_cores()) == sorted(os.sched_getaffinity(0))


def is_free(locks) -> bool:
    try:
        with hold_one([locks], refuse, longest_s=0.0):
            return True
    except DeviceBusyError:
        return False


def test_slots_run_beside_slots_of_other_cores_and_nothing_else(cores) -> None:
    first, second = cpu_slots(2)
    three = cpu_slots(3)
    with hold_one([first.locks], refuse):
        assert is_free(second.locks)
        assert not is_free(first.locks)
        assert [is_free(slot.locks) for slot in three] == [False, False, True]
        assert not is_free(cpu_slot(1).locks)
        assert not is_free(cpu_slot(1, shared=True).locks)
    for other in (cpu_slot(1), cpu_slot(1, shared=True)):
        with hold_one([other.locks], refuse):
            assert not is_free(first.locks)
    with hold_one([cpu_slot(1, shared=True).locks], refuse):
        assert is_free(cpu_slot(1, shared=True).locks)


@pytest.mark.parametrize("bad", ["0", "8", "two", "-1", "1.5", "9" * 400])
def test_what_is_no_number_of_slots_is_refused_by_name(cores, monkeypatch, bad) -> None:
    with pytest.raises(InputError, match=r"--cpu-slots: .* it must be from 1 to 7, the number of"):
        count_cpu_slots(bad)
    monkeypatch.setenv("DPPROF_CPU_SLOTS", bad)
    with pytest.raises(InputError, match=r"DPPROF_CPU_SLOTS: .* it must be from 1 to 7"):
        count_cpu_slots()


def test_there_are_none_by_default_and_the_option_comes_before_the_variable(
    cores, monkeypatch
) -> None:
    monkeypatch.delenv("DPPROF_CPU_SLOTS", raising=False)
    assert count_cpu_slots() == 1
    monkeypatch.setenv("DPPROF_CPU_SLOTS", "3")
    assert (count_cpu_slots(), count_cpu_slots("2")) == (3, 2)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core has no two slots")
def test_two_measurements_are_at_work_at_once_on_cores_of_their_own(tmp_path) -> None:
    """Each goes on only when the other is at work too."""
    (met := tmp_path / "met").mkdir()
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT / "tests" / "plugin")])
    settings = {"PYTHONPATH": path, "DPPROF_LOCK_DIR": str(tmp_path), "DPPROF_CPU_SLOTS": "2"}
    settings |= {"DPPROF_TEST_MARKER": str(met), "DPPROF_TEST_TOGETHER": "2"}
    fields = ["--model=tiny", "--method=standard", "--batch-size=1", "--seq-len=4", "--device=cpu"]
    command = [sys.executable, str(SCRIPT), *fields, "--instrument=test-meets"]
    outputs = [tmp_path / name for name in ("a.json", "b.json")]
    running = [
        subprocess.Popen([*command, f"--output={output}"], env=os.environ | settings)
        for output in outputs
    ]
    assert [process.wait(timeout=120) for process in running] == [0, 0]

    results = [read_result(output) for output in outputs]
    stayed_on = sorted(json.loads(path.read_text()) for path in met.iterdir())
    assert sorted(result.device["pinned_to"] for result in results) == stayed_on
    size = len(os.sched_getaffinity(0)) // 2
    assert [len(cores) for cores in stayed_on] == [size, size]
    assert not set(stayed_on[0]) & set(stayed_on[1])
    assert {result.device["cores"] for result in results} == {size}
