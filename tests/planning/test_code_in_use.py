"""A digest is that of the code that ran, or of none, whoever edits what and when."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from children import refuse, wait_for
from factory import make_experiment
from fresh_process import ROOT

from dpprof.launch.device_lock import hold_one
from dpprof.records.record import read_record
from dpprof.records.result import read_result
from dpprof.records.verdict import SCHEMA_VERSION, Verdict

PLUGIN = ROOT / "tests" / "plugin"
METHOD, SUPERVISOR = "src/dpprof/methods/standard.py", "src/dpprof/launch/supervisor.py"
EXPERIMENT = make_experiment(model="test-linear")


@pytest.fixture
def copy(tmp_path, monkeypatch) -> Path:
    """A checkout of its own, which a test may edit."""
    monkeypatch.setenv("PYTHONPATH", str(PLUGIN))
    monkeypatch.setenv("DPPROF_TEST_MARKER", str(tmp_path / "running"))
    for part in ("src", "workflow"):
        shutil.copytree(ROOT / part, tmp_path / "copy" / part)
    return tmp_path / "copy"


def start(copy: Path, script: str, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, f"workflow/scripts/{script}", "--output=x.json", *options]
    return subprocess.Popen(command, cwd=copy, stderr=subprocess.PIPE, text=True)


def profile(copy: Path) -> subprocess.Popen[str]:
    (copy / f"{EXPERIMENT.id}.json").write_text(EXPERIMENT.canonical)
    spec = f"--spec={EXPERIMENT.id}.json"
    return start(copy, "profile.py", spec, "--instrument=test-waits")


def edit(copy: Path, file: str) -> None:
    with (copy / file).open("a") as opened:
        opened.write("EDITED = True\n")


def digest(copy: Path, call: str) -> str:
    """Ask the copy for a digest of its code as it is now."""
    code = f"from factory import *; from dpprof.planning.code_digest import *; print({call})"
    path = os.pathsep.join(map(str, (copy / "src", ROOT / "tests", PLUGIN)))
    return subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()


MEASURING = "code_digest('test-waits', make_experiment(model='test-linear'))"
VERIFYING = "verdict_digest('test-linear', 'standard')"


def edit_while_waiting(copy: Path, process: subprocess.Popen[str], file: str) -> None:
    """Edit a file between a process's start and its turn; the caller holds the lock."""
    assert process.stderr is not None
    next(line for line in process.stderr if "waiting" in line)
    edit(copy, file)


def let_go(copy: Path, process: subprocess.Popen[str]) -> str:
    running = copy.parent / "running"
    wait_for(running.exists)
    running.unlink()
    said = process.communicate(timeout=120)[1]
    assert process.returncode == 0, said
    return said


def test_a_method_edited_while_waiting_is_recorded_as_edited(copy) -> None:
    before = digest(copy, MEASURING)
    with hold_one([["cpu"]], refuse):
        process = profile(copy)
        edit_while_waiting(copy, process, METHOD)
    let_go(copy, process)

    after = digest(copy, MEASURING)
    assert read_result(copy / "x.json").code_digest == after
    assert after != before


@pytest.mark.parametrize("file", [METHOD, SUPERVISOR])
def test_code_edited_while_it_runs_is_recorded_as_no_code_there_ever_was(copy, file) -> None:
    before = digest(copy, MEASURING)
    process = profile(copy)
    wait_for((copy.parent / "running").exists)
    edit(copy, file)
    said = let_go(copy, process)

    assert read_result(copy / "x.json").code_digest not in {before, digest(copy, MEASURING)}
    assert "counts as outdated" in said


def test_a_supervisor_edited_while_it_waits_is_neither_the_old_nor_the_new(copy) -> None:
    before = digest(copy, MEASURING)
    with hold_one([["cpu"]], refuse):
        process = profile(copy)
        edit_while_waiting(copy, process, SUPERVISOR)
    let_go(copy, process)

    assert read_result(copy / "x.json").code_digest not in {before, digest(copy, MEASURING)}


def test_a_verdict_is_on_the_method_as_it_was_when_its_turn_came(copy) -> None:
    before = digest(copy, VERIFYING)
    with hold_one([["cpu"]], refuse):
        options = ("--model=test-linear", "--method=standard")
        process = start(copy, "verify.py", *options)
        edit_while_waiting(copy, process, METHOD)
    said = process.communicate(timeout=120)[1]

    assert process.returncode == 0, said
    after = digest(copy, VERIFYING)
    assert read_record(copy / "x.json", Verdict, SCHEMA_VERSION).code_digest == after != before
