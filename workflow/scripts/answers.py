"""Find what the documentation asks of ``advise``, ``budget`` and ``fits``; keep the answers."""

import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dpprof.records.answers import keep_answers
from dpprof.records.record import write_record
from dpprof.records.result import Result, read_result

ROOT = Path(__file__).resolve().parents[2]
_COMMAND = re.compile(r"^dpprof ((?:advise|budget|fits) (?:.*\\\n)*.*)$", re.MULTILINE)


def find_questions() -> Iterator[list[str]]:
    """Yield the arguments of each question in a page of the documentation."""
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))):
        for found in _COMMAND.findall(page.read_text(encoding="utf-8")):
            yield shlex.split(found.replace("\\\n", " "))


def main() -> None:
    """Run from the command line."""
    with tempfile.TemporaryDirectory() as folder:
        for arguments in find_questions():
            print(shlex.join(["dpprof", *arguments]), flush=True)
            # Some ask what does not fit, which is an answer too.
            subprocess.run([sys.executable, "-m", "dpprof", *arguments], cwd=folder, check=False)
        found = sorted(Path(folder, "results", "capacity").glob("*.json"))
        for path in found:
            _forget_machine(path)
        keep_answers([*found, *Path(folder, "results", "accounting").glob("*.json")])
    print(f"{len(found)} capacities are kept")


def _forget_machine(path: Path) -> None:
    """Leave out of a result which machine found it, and where."""
    result = read_result(path)
    kept = {name: result.provenance.get(name) for name in ("python", "packages")}
    write_record(path, Result, dict(result) | {"provenance": kept})


if __name__ == "__main__":
    main()
