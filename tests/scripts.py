"""Subcommands, run as the workflow's rules run them."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = ROOT / "workflow" / "scripts" / "run.py"


def run(command: str, *options: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), command, *options],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
    )
