"""Others are told from the child that is measured."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from dpprof.experiments.launch import isolated
from dpprof.experiments.launch.isolated import watch_others

SPIN = "import time; end = time.process_time() + {seconds}\nwhile time.process_time() < end: pass"


def spin(seconds: float) -> subprocess.Popen:
    return subprocess.Popen([sys.executable, "-c", SPIN.format(seconds=seconds)])


@pytest.fixture
def machine(monkeypatch) -> SimpleNamespace:
    """A machine whose clocks stand where the test puts them."""
    state = SimpleNamespace(now=100.0, user=50.0, steal=0.0, idle=900.0, children=7.0)

    def cpu_times():
        times = {"user": state.user, "system": 1.0, "idle": state.idle, "guest": state.user}
        times |= {"iowait": state.idle, "steal": state.steal}
        return SimpleNamespace(_asdict=lambda: times)

    usage = SimpleNamespace(ru_utime=0.0, ru_stime=0.0)
    monkeypatch.setattr(isolated.time, "monotonic", lambda: state.now)
    monkeypatch.setattr(isolated.psutil, "cpu_times", cpu_times)
    monkeypatch.setattr(isolated.resource, "getrusage", lambda _: usage)
    state.usage = usage
    return state


def test_what_the_child_used_is_taken_off_and_what_was_stolen_counts(machine) -> None:
    watched = watch_others()
    machine.now += 10
    machine.idle += 3
    machine.user += 16  # the child 12, others 4
    machine.usage.ru_utime, machine.usage.ru_stime = 11, 1
    machine.steal += 1

    assert watched() == pytest.approx((4 + 1) / 10)


def test_another_process_is_a_neighbour() -> None:
    other = spin(30)
    try:
        watched = watch_others()
        spin(0.5).wait()
        busy = watched()
    finally:
        other.kill()
        other.wait()

    assert busy > 0.5
