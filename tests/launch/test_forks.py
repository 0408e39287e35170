"""Forked children, tested in a process of their own: a process has one server for all."""

import sys
from pathlib import Path

from fresh_process import ROOT, run_captured


def test_forked_children_answer_fail_print_and_end_as_others_do() -> None:
    tests = Path(__file__).with_name("forked_children.py")
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tests)]
    done = run_captured(command, ROOT)
    assert "6 passed" in done.stdout, done.stdout
