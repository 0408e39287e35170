"""Python code in a process that has imported nothing yet."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def run_fresh(code: str, *arguments: str, plugin: Path | None = None) -> str:
    """Run code that can import dpprof, tests/factory and a plug-in; returns what it prints."""
    folders = [ROOT / "src", ROOT / "tests", *([plugin] if plugin else [])]
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, folders))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()
