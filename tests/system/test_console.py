"""Neither the terminal nor the log's disk can fail what is being done."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fresh_process import run_captured
from products import one_in

ROOT = Path(__file__).parents[2]
PROGRAM = """
import os, subprocess, sys
from pathlib import Path
from dpprof.system.console import keep_log, say
keep_log(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
with open("result.txt", "w") as result:
    print("printed")
    print("warned", file=sys.stderr)
    os.system("echo by a child >&2")
    say("said\\x1b[2J")
    result.write(str(result.fileno() > 2))
"""


def run(folder: Path, *arguments: str, shell: str = "") -> subprocess.CompletedProcess[str]:
    program = folder / "program.py"
    program.write_text(PROGRAM)
    words = [sys.executable, str(program), *arguments]
    command = ["bash", "-c", f'"$@" {shell}', "bash", *words] if shell else words
    return run_captured(command, folder, PYTHONPATH=str(ROOT / "src"))


def test_a_log_has_what_is_printed_and_the_terminal_what_is_said(tmp_path) -> None:
    done = run(tmp_path, "logs/x.log")

    assert (done.returncode, done.stdout, done.stderr) == (0, "", "dpprof: said\\x1b[2J\n")
    printed = (tmp_path / "logs" / "x.log").read_text()
    assert printed == "printed\nwarned\nby a child\ndpprof: said\\x1b[2J\n"


CLOSED = ["2>&-", ">&- 2>&-", "<&- >&- 2>&-"]
FULL = "2>/dev/full >&2"


@pytest.mark.parametrize(
    ("log", "shell"),
    [
        *one_in(3, [[], ["x.log"], ["/dev/full"]], CLOSED),
        (["x.log"], FULL),
        pytest.param(["/dev/full"], FULL, marks=pytest.mark.slow),
    ],
)
def test_closed_streams_and_full_disks_cost_nothing(tmp_path, log, shell: str) -> None:
    """And the next file takes no place of a stream that was closed."""
    assert run(tmp_path, *log, shell=shell).returncode == 0
    assert (tmp_path / "result.txt").read_text() == "True"


@pytest.mark.parametrize("kind", ["folder", "pipe", "below a file"])
def test_a_log_that_cannot_be_opened_is_told_and_costs_nothing(tmp_path, kind: str) -> None:
    log = tmp_path / "x.log"
    if kind == "folder":
        log.mkdir()
    elif kind == "pipe":
        os.mkfifo(log)
    else:
        log.write_text("")
        log = log / "y.log"
    done = run(tmp_path, str(log))

    assert done.returncode == 0
    assert "dpprof: no log is written: [Errno" in done.stderr
    assert str(tmp_path / "x.log") in done.stderr
    assert (tmp_path / "result.txt").read_text() == "True"
