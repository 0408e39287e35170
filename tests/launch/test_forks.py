"""Forked children, tested in a process of their own: a process has one server for all."""

import subprocess
import sys
from pathlib import Path

from fresh_process import ROOT


def test_forked_children_answer_fail_print_and_end_as_others_do() -> None:
    tests = Path(__file__).with_name("forked_children.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert "6 passed" in done.stdout, done.stdout
