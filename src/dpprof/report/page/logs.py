"""The last lines of logs, for the failures that the HTML report lists."""

import os
from collections.abc import Iterable
from pathlib import Path

_BYTES = 4096
LINES = 20


def read_end(log: Path, folder: Path) -> str | None:
    """Return the last lines of a log; None if it cannot be read.

    A log that lies outside of ``folder``, by links or by ``..``, is not read: its path comes from
    a result file.
    """
    try:
        if not log.resolve().is_relative_to(folder.resolve()) or not log.is_file():
            return None
        with log.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - _BYTES))
            text = file.read(_BYTES).decode(errors="replace")
    except (OSError, ValueError):
        return None
    lines = text.splitlines()
    return "\n".join(lines[-LINES:])


def read_ends(logs: Iterable[str], root: Path, folder: Path) -> list[str | None]:
    """Return the last lines of logs whose paths are relative to ``root``; see ``read_end``."""
    return [read_end(root / log, folder) for log in logs]
