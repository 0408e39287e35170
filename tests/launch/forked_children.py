"""Forked children answer, fail, print and end as other children do."""

import os
import time

import pytest

from dpprof.experiments.launch.device_slots import cpu_slot
from dpprof.experiments.launch.forks import Forks
from dpprof.experiments.launch.isolated import isolate
from dpprof.system.child_output import Sink


@pytest.fixture(scope="module")
def forks():
    return Forks(["json.tool", "no.such.module"])


@pytest.fixture
def isolation():
    with isolate(None, [cpu_slot(1, shared=True)], lambda: "", __file__) as isolation:
        isolation.begin(DPPROF_TEST_WORD="shared")
        yield isolation


def test_an_answer_comes_from_another_process_that_leads_a_session(forks, isolation) -> None:
    function = "os:getsid"
    ended = isolation.run(int, function, 0, timeout_s=60, forks=forks)
    assert ended.returncode == 0
    assert ended.answer not in {None, os.getsid(0)}


def test_the_modules_are_imported_once_for_all(forks, isolation) -> None:
    program = (
        "import gc, sys; assert 'json.tool' in sys.modules and gc.isenabled(); print('it is there')"
    )
    ended = isolation.run(str, "builtins:exec", program, timeout_s=60, forks=forks)
    assert (ended.returncode, ended.output) == (0, "it is there\n")


def test_a_crash_reaches_only_its_own_child(forks, isolation, tmp_path) -> None:
    log = tmp_path / "log"
    ended = isolation.run(int, "os:abort", timeout_s=60, sink=Sink(log), forks=forks)
    assert ended.answer is None
    assert ended.returncode == -6
    assert "Fatal Python error: Aborted" in log.read_text(encoding="utf-8")
    assert isolation.run(int, "os:getpid", timeout_s=60, forks=forks).answer != os.getpid()


@pytest.mark.parametrize("timeout_s", [0, 1])
def test_a_child_that_hangs_is_killed_at_its_timeout(forks, isolation, timeout_s) -> None:
    since = time.monotonic()
    ended = isolation.run(int, "time:sleep", 600, timeout_s=timeout_s, forks=forks)
    assert (ended.timed_out, ended.returncode, ended.answer) == (True, -9, None)
    assert time.monotonic() - since < 60


def test_files_are_inherited_under_whatever_number(forks, isolation, tmp_path) -> None:
    path = tmp_path / "file"
    with path.open("w+b") as file:
        descriptor = file.fileno()
        ended = isolation.run(
            int, "os:truncate", descriptor, 5, timeout_s=60, pass_fds=(descriptor,), forks=forks
        )
    assert ended.returncode == 0
    assert path.stat().st_size == 5
