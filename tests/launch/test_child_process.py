"""A child that is asked ends with its asker, and so does what it has started."""

import os
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from dpprof.launch.child_process import UnansweredError, ask_child
from dpprof.launch.device_lock import hold_one

HERE = Path(__file__).parent


def brood(folder: str) -> None:
    """Start four that sleep, the last in a session of its own, and name them and oneself."""
    for number in range(4):
        if os.fork() == 0:
            if number == 3:
                os.setsid()
            (Path(folder) / f"{number}.pid").write_text(str(os.getpid()))
            time.sleep(3600)
    (Path(folder) / "asked.pid").write_text(str(os.getpid()))
    wait_for(lambda: len(running(Path(folder))) == 5)


def tell(folder: str) -> str:
    brood(folder)
    return "told"


def die(folder: str) -> None:
    brood(folder)
    os._exit(7)


def sleep(folder: str) -> None:
    brood(folder)
    time.sleep(3600)


def shout() -> None:
    for _ in range(300):
        os.write(1, b"x" * 10**6)


def running(folder: Path) -> list[psutil.Process]:
    pids = [int(text) for path in folder.glob("*.pid") if (text := path.read_text())]
    return [psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)]


def wait_for(condition) -> None:
    for _ in range(1200):
        if condition():
            return
        time.sleep(0.05)
    raise AssertionError("what was waited for did not happen")


def refuse() -> None:
    raise TimeoutError


def ask(function: str, *arguments: str):
    with hold_one(["cpu"], refuse) as (_, lock_fd):
        limits = {"timeout_s": 60, "lock_fd": lock_fd}
        return ask_child("question", "test_asking", function, *arguments, **limits)


def test_who_has_answered_leaves_nobody_behind(tmp_path) -> None:
    assert ask("tell", str(tmp_path)) == "told"
    assert len(list(tmp_path.iterdir())) == 5
    assert running(tmp_path) == []


def test_who_dies_leaves_nobody_behind_and_keeps_nobody_waiting(tmp_path) -> None:
    with pytest.raises(UnansweredError, match="ended with exit code 7"):
        ask("die", str(tmp_path))
    assert running(tmp_path) == []


def test_a_killed_asker_takes_the_child_and_its_group_along_and_the_lock_is_free(tmp_path) -> None:
    """Only who is in a session of its own stays, and has no lock."""
    code = f"import test_asking; test_asking.ask('sleep', {str(tmp_path)!r})"
    path = os.pathsep.join([str(HERE.parent / "src"), str(HERE)])
    asker = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path})
    try:
        wait_for(lambda: len(running(tmp_path)) == 5)
        with pytest.raises(TimeoutError), hold_one(["cpu"], refuse):
            pass
        asker.kill()
        asker.wait()

        escaped = int((tmp_path / "3.pid").read_text())
        wait_for(lambda: [process.pid for process in running(tmp_path)] == [escaped])
        with hold_one(["cpu"], refuse):
            pass
    finally:
        asker.kill()
        for process in running(tmp_path):
            process.kill()


def test_what_a_child_shouts_is_bounded(capsys) -> None:
    ask("shout")
    said = capsys.readouterr().err

    assert len(said) < 12 * 2**20
    assert "bytes of output are left out here" in said
