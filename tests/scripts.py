"""Subcommands, run as a rule of the workflow runs them, and in this process."""

import contextlib
import io
import subprocess
import sys
from pathlib import Path

from dpprof.ask.commands.main import main

ROOT = Path(__file__).resolve().parents[1]
MODEL = "{vocab_size: 16, d_model: 8, layers: 1, heads: 2}"
ASKED = ["--model", MODEL, "--seq-len", "8", "--methods", "standard", "flash-bk"]
HERE = ["--target", "l4", "--memory-limit-bytes", "25MiB"]


def spell(command: str, *options: str) -> list[str]:
    """Return the words by which a rule of the workflow runs a subcommand."""
    script = ROOT / "workflow" / "scripts" / "subcommand.py"
    return [sys.executable, str(script), command, *options]


def call(command: str, *options: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a subcommand in this process, which costs no start of an interpreter."""
    out, error, status = io.StringIO(), io.StringIO(), 0
    with (
        contextlib.chdir(cwd),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(error),
    ):
        try:
            main([command, *options])
        except SystemExit as ended:
            status = int(ended.code or 0)
    return subprocess.CompletedProcess(command, status, out.getvalue(), error.getvalue())
