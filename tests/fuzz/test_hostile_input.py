"""Whatever is given or read, a few printable lines say what is wrong, soon, and no harm is done."""

import os
import sys
from pathlib import Path

import pytest
from fresh_process import run_captured

APART = Path(__file__).with_name("apart.py")
FOLDERS = [APART.parents[2] / "src", APART.parents[1]]


def judge(**counts: int) -> dict[str, int]:
    """Judge as many cases of each kind; return how many there were."""
    command = [sys.executable, APART, *(f"{kind}={count}" for kind, count in counts.items())]
    done = run_captured(command, PYTHONPATH=os.pathsep.join(map(str, FOLDERS)))
    assert done.returncode == 0, done.stderr[-20_000:]
    pairs = (line.split() for line in done.stdout.splitlines())
    return {kind: int(count) for kind, count in pairs}


def test_hostile_input_is_refused() -> None:
    judged = judge(configs=6, commands=3, files=2)

    assert judged["configs"] >= 6
    assert judged["commands"] >= 3
    assert judged["files"] >= 2


@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("kind", ["configs", "commands", "files"])
def test_much_hostile_input_is_refused(kind: str) -> None:
    count = 2000 if kind == "configs" else 1000
    assert judge(**{kind: count})[kind] >= count
