"""Runs a case in a process and a folder of its own, and says what is wrong with its outcome."""

import contextlib
import os
import re
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

from damage import MARK

SECONDS = 30
"""The most CPU time of a case."""

BYTES = 2**30
"""The most memory of a case."""


class Kind(NamedTuple):
    """A kind of cases."""

    make: Callable[[Any], Any]
    """Draws a case from a ``random.Random``."""

    furnish: Callable[[Any], None]
    """Puts what a case needs into the working folder."""

    run: Callable[[Any], int]
    """Runs a case there, and returns its exit status."""

    statuses: tuple[int, ...]
    """The exit statuses that are right."""

    writes: bool
    """Whether it may change the folder ``results``."""

    letters: int
    """The most that it may print."""


class _Tags(HTMLParser):
    """Finds elements and attributes that an injected text has made."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.found = False
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found |= tag == MARK or any(name.startswith("on") for name, _ in attrs)


_IN_MARKDOWN = re.compile(rf"<{MARK}|(?<!\\)\]\([a-z]+:[^)]*{MARK}|(?<!\\)`touch|(?m:^# {MARK})")
_IN_LATEX = re.compile(rf"\\{MARK}|\^\^5c")


def find_markup(text: str, kind: str) -> bool:
    """Return whether an injected text became markup, by the ending of the file."""
    if kind == ".html":
        return _Tags(text).found
    return bool({".md": _IN_MARKDOWN, ".tex": _IN_LATEX}[kind].search(text))


def judge(kind: Kind, case: Any) -> str | None:
    """Run a case in a process; return what is wrong with its outcome."""
    with tempfile.TemporaryDirectory() as outside:
        folder = Path(outside) / "inside"
        folder.mkdir()
        with contextlib.chdir(folder):
            kind.furnish(case)
        own = folder / "results" if kind.writes else None
        before = _look(Path(outside), own)
        with tempfile.TemporaryFile() as said:
            child = os.fork()
            if child == 0:
                _be_the_child(kind, case, folder, said.fileno())
            _, status, usage = os.wait4(child, 0)
            said.seek(0)
            text = said.read().decode(errors="replace")
        changed = sorted({path for path, _ in before ^ _look(Path(outside), own)})
        pages = [path for path in folder.glob("results/*.*") if path.suffix in _PAGES]
        marked = [page.name for page in pages if find_markup(page.read_text(), page.suffix)]
        executed = [str(path) for path in Path(outside).rglob(MARK)]
    code = os.waitstatus_to_exitcode(status)
    seconds = usage.ru_utime + usage.ru_stime
    wrong = {
        f"exit status {code}": code not in kind.statuses,
        "a traceback": "Traceback" in text,
        "nothing said": code != 0 and not text.strip(),
        "codes for a terminal": not all(c.isprintable() or c == "\n" for c in text),
        f"{len(text):,} letters": len(text) > kind.letters,
        f"{seconds:.0f} s": seconds > SECONDS,
        f"{usage.ru_maxrss // 1024:,} MiB": usage.ru_maxrss * 1024 > BYTES,
        f"changed {changed[:3]}": bool(changed),
        f"executed {executed[:3]}": bool(executed),
        f"markup in {marked}": bool(marked),
    }
    found = [name for name, is_so in wrong.items() if is_so]
    return f"{', '.join(found)}: {text[-800:]}" if found else None


_PAGES = {".html", ".md", ".tex"}


def _look(folder: Path, own: Path | None) -> set[tuple[str, tuple[int, ...]]]:
    """Return what tells the files of a folder apart from later ones, but for those in ``own``."""
    found = set()
    for path in [folder, *folder.rglob("*")]:
        if own is None or not path.is_relative_to(own):
            info = path.lstat()
            of_files = () if path.is_dir() else (info.st_size, info.st_mtime_ns)
            found.add((str(path.relative_to(folder)), (info.st_mode, *of_files)))
    return found


def _be_the_child(kind: Kind, case: Any, folder: Path, output: int) -> None:
    code = 3
    try:
        os.chdir(folder)
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.stdout = sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        resource.setrlimit(resource.RLIMIT_AS, (4 * BYTES, 4 * BYTES))
        resource.setrlimit(resource.RLIMIT_CPU, (2 * SECONDS, 2 * SECONDS))
        signal.alarm(20 * SECONDS)
        code = kind.run(case)
    except BaseException:  # noqa: BLE001 (a traceback is what is looked for)
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)
