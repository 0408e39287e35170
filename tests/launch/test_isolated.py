"""A child that is asked ends with its asker, and so does what it has started."""

import os
import subprocess
import sys

import pytest
from children import HERE, ask, refuse, running, wait_for

from dpprof.launch.isolated import UnansweredError
from dpprof.launch.device_lock import hold_one


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
    code = f"import children; children.ask('sleep', {str(tmp_path)!r})"
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
