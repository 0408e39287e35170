"""Run the README's commands of dpprof in an empty folder: .ci/readme_commands.py results.

What they print first is compared with .ci/first_lines.txt: a command, and below it a line. The
placeholders A.json and B.json stand for two estimates of a sweep, BASELINE and CANDIDATE for the
sweep itself.
"""

import difflib
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parents[1]
FIRST_LINES = ROOT / ".ci" / "first_lines.txt"


def list_commands() -> list[str]:
    """Return the commands in the README's blocks of code, each on one line."""
    text = (ROOT / "README.md").read_text(encoding="utf-8").replace("\\\n", "")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    commands = (block for language, block in blocks if not language)
    lines = [" ".join(line.split()) for block in commands for line in block.splitlines()]
    return [line for line in lines if line.startswith("dpprof ")]


def put_placeholders(folder: Path, results: Path) -> None:
    """Put what commands name into a folder."""
    estimates = sorted((results / "estimate").glob("*.json"))
    for name, path in zip(("A.json", "B.json"), estimates, strict=False):
        shutil.copy(path, folder / name)
    for name in ("BASELINE", "CANDIDATE"):
        shutil.copytree(results, folder / name)


def run(command: str, folder: Path) -> str:
    """Return the first line that a command prints; its errors pass through."""
    start = time.monotonic()
    arguments = shlex.split(command)
    done = subprocess.run(arguments, cwd=folder, stdout=subprocess.PIPE, text=True, check=True)
    print(f"{time.monotonic() - start:.0f} s  {command}", flush=True)
    return next(iter(done.stdout.splitlines()), "")


def main(results: Path) -> None:
    """Run all commands, and fail where one prints another first line, with the difference."""
    os.environ["PATH"] = f"{ROOT / '.venv' / 'bin'}:{os.environ['PATH']}"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        put_placeholders(folder, results)
        said = [line for one in list_commands() for line in (one, "  " + run(one, folder))]
    expected = FIRST_LINES.read_text(encoding="utf-8").splitlines()
    if said != expected:
        sys.exit("\n".join(difflib.unified_diff(expected, said, str(FIRST_LINES), "now")))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
