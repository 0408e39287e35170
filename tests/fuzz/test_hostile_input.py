"""Whatever is given, it is refused in a few printable lines, soon, and nothing is touched."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

APART = Path(__file__).with_name("apart.py")


def wrongly_refused(kind: str, first: int, count: int) -> list[str]:
    done = subprocess.run(
        [sys.executable, str(APART), kind, str(first), str(count)],
        env=os.environ | {"PYTHONPATH": str(APART.parents[2] / "src")},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


@pytest.mark.parametrize(("kind", "count"), [("configs", 40), ("commands", 20)])
def test_hostile_input_is_refused(kind: str, count: int) -> None:
    assert wrongly_refused(kind, 0, count) == []


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "count"), [("configs", 1000), ("commands", 500)])
def test_much_hostile_input_is_refused(kind: str, count: int) -> None:
    assert wrongly_refused(kind, 1000, count) == []
