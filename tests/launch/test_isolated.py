"""However a child ends, its parent is told, and what it has started ends with it."""

import os
import subprocess
import sys

import pytest
from children import HERE, ask, refuse, running, wait_for

from dpprof.experiments.launch.device_lock import hold_one


@pytest.fixture
def output(tmp_path_factory):
    return tmp_path_factory.mktemp("output") / "x.json"


ENDS = {
    "kill": "the question's process ended with signal 9 before it could answer",
    "fail": "the question's process ended with exit code 1 before it could answer",
    "hang": "the question took longer than 1 s",
}


@pytest.mark.parametrize("ending", ENDS)
def test_however_a_child_ends_the_reason_is_told(output, ending) -> None:
    limit_s = 1 if ending == "hang" else 60
    ended = ask(ending, output=output, timeout_s=limit_s)

    assert ended.answer is None
    assert ended.explain("question", limit_s) == ENDS[ending]
    assert ("ValueError: no" in ended.output) == (ending == "fail")


def test_an_answer_that_cannot_be_encoded_is_spelled(output) -> None:
    assert ask("tell_half_a_character", output=output).answer == "half a \\ud800 character"


def test_who_has_answered_leaves_nobody_behind(tmp_path, output) -> None:
    assert ask("tell", str(tmp_path), output=output).answer == "told"
    assert len(list(tmp_path.iterdir())) == 5
    assert running(tmp_path) == []


def test_who_dies_leaves_nobody_behind_and_keeps_nobody_waiting(tmp_path, output) -> None:
    assert ask("die", str(tmp_path), output=output).returncode == 7
    assert running(tmp_path) == []


def test_a_killed_asker_takes_the_child_and_its_group_along_and_the_lock_is_free(
    tmp_path, output
) -> None:
    """Only who is in a session of its own stays, and has no lock."""
    code = f"from children import *; ask('sleep', {str(tmp_path)!r}, output=Path({str(output)!r}))"
    path = os.pathsep.join([str(HERE.parent / "src"), str(HERE)])
    asker = subprocess.Popen([sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": path})
    try:
        wait_for(lambda: len(running(tmp_path)) == 5)
        with pytest.raises(TimeoutError), hold_one([["cpu"]], refuse):
            pass
        asker.kill()
        asker.wait()

        escaped = int((tmp_path / "3.pid").read_text())
        wait_for(lambda: [process.pid for process in running(tmp_path)] == [escaped])
        with hold_one([["cpu"]], refuse):
            pass
    finally:
        asker.kill()
        for process in running(tmp_path):
            process.kill()


def test_what_a_child_shouts_is_bounded(capsys, output) -> None:
    ask("shout", output=output)
    said = capsys.readouterr().err

    assert len(said) < 12 * 2**20
    assert "bytes of output are left out here" in said
