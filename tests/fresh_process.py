"""Python code in a process that has imported nothing yet."""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_captured(
    command: Sequence[str | Path], cwd: Path | None = None, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command, whatever its status; returns it with what it printed."""
    environment = os.environ | variables
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, check=False
    )


def run_fresh(code: str, *arguments: str, plugin: Path | None = None) -> str:
    """Run code that can import dpprof, tests/factory and a plug-in; returns what it prints."""
    folders = [ROOT / "src", ROOT / "tests", *([plugin] if plugin else [])]
    path = os.pathsep.join(map(str, folders))
    done = run_captured([sys.executable, "-c", code, *arguments], PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
