"""How a measurement is run: threads of the host, and how long to wait for a device."""

import os

import pytest
from children import refuse
from factory import make_experiment
from scripts import call

from dpprof.experiments.launch import supervisor
from dpprof.experiments.launch.device_lock import hold_one

RUN = ("--model=tiny", "--method=standard", "--batch-size=1", "--seq-len=4", "--device=cpu")
COMMANDS = {
    "profile": RUN,
    "verify": ("--model=built-in", "--method=standard"),
    "ceilings": ("--device=cpu",),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_device_that_stays_busy_ends_each_command_with_a_status_of_its_own(
    tmp_path, monkeypatch, command
) -> None:
    monkeypatch.setenv("DPPROF_MAX_WAIT_S", "0")
    with hold_one([["cpu"]], refuse):
        done = call(command, *COMMANDS[command], "--output=x.json", cwd=tmp_path)

    assert done.returncode == os.EX_TEMPFAIL
    assert done.stderr.startswith(f"error: cpu: still taken after 0 s, by process {os.getpid()} (")
    assert done.stderr.endswith("; DPPROF_MAX_WAIT_S says how many seconds to wait\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("cpu_threads", "threads", "had"),
    [(None, None, 8), (None, 2, 2), (None, 99, 8), (3, 2, 3), (3, None, 3)],
)
def test_threads_are_the_experiments_else_the_options_else_one_for_each_core(
    monkeypatch, cpu_threads, threads, had
) -> None:
    monkeypatch.setattr(supervisor, "available_cores", lambda: 8)
    experiment = make_experiment(cpu_threads=cpu_threads)
    (slot,) = supervisor._slots(experiment, "clean", threads)

    assert slot.environment["OMP_NUM_THREADS"] == str(had)
    assert slot.describe()["threads"] == had


def test_a_prediction_has_the_threads_of_what_it_predicts(monkeypatch) -> None:
    monkeypatch.setattr(supervisor, "available_cores", lambda: 8)
    (slot,) = supervisor._slots(make_experiment(), "estimate", 1)

    assert slot.environment["OMP_NUM_THREADS"] == "8"
