"""The scripts of the workflow and the commands of dpprof, run as a user runs them."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def run(name: str, *options: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a script, such as ``profile.py``, or a command that has none, such as ``forget``."""
    is_script = name.endswith(".py")
    begin = [str(ROOT / "workflow" / "scripts" / name)] if is_script else ["-m", "dpprof", name]
    return subprocess.run(
        [sys.executable, *begin, *options],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
    )
