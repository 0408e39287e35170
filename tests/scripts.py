"""The scripts of the workflow, run as a user runs them."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run(script: str, *options: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "workflow" / "scripts" / script), *options],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
    )
