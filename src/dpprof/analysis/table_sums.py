"""Checksums of the tables of a folder, by which a table that was cut or edited is found."""

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from dpprof.spec.validation import InputError
from dpprof.system.files import write_atomically

SUMS = "sha256sums.txt"
"""The file of the checksums, as ``sha256sum --check`` reads it."""

_AGAIN = "delete the tables and run snakemake, which makes them again"

_LINE = re.compile(r"(?P<digest>[0-9a-f]{64})  (?P<name>.+)")


def write_sums(folder: Path, names: Iterable[str]) -> None:
    """Write the checksums of files in a folder."""
    lines = [f"{_digest(folder / name)}  {name}\n" for name in names]
    write_atomically(folder / SUMS, "".join(lines))


def check_sum(path: Path) -> None:
    """Check that a table is as ``write_sums`` found it.

    Raises:
        InputError: It is not, or the folder has no checksum of it; the message names the file.
        OSError: A file cannot be read.
    """
    digest, sums = _digest(path), path.parent / SUMS
    if not sums.is_file():
        raise InputError(
            f"{sums}: is missing, so nobody can tell whether {path} is whole; {_AGAIN}"
        )
    text = sums.read_text(encoding="utf-8", errors="replace")
    known = {line["name"]: line["digest"] for line in _LINE.finditer(text)}
    if known.get(path.name) != digest:
        raise InputError(f"{path}: was cut or edited after it was written; {_AGAIN}")


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
