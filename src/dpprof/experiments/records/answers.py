"""Files that come with the package: answers to what the documentation asks.

``make answers`` finds them anew. A capacity counts only where it would come out the same: its code
digest is that of the sources and library versions that are installed. The file of noise multipliers
has that in its name.
"""

import bisect
import contextlib
import functools
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from dpprof.system.files import write_atomically

_KEPT = Path(__file__).with_name("answers.zip")
_FILES = 16
"""How many files one member of the archive holds: few to read for one, many to compress well."""


def take_kept(path: Path, holding: str = "") -> None:
    """Write a file that comes with the package and holds a text, if there is none that holds it."""
    text = kept_answers().get(path.name, "")
    if not text or holding not in text:
        return
    with contextlib.suppress(FileNotFoundError):
        if holding.encode() in path.read_bytes():
            return
    write_atomically(path, text)


def keep_answers(files: Iterable[Path]) -> None:
    """Keep the text of files, by name, in place of those that are kept now."""
    texts = {path.name: path.read_text(encoding="utf-8") for path in files}
    names = sorted(texts)
    with zipfile.ZipFile(_KEPT, "w", zipfile.ZIP_LZMA) as archive:
        for start in range(0, len(names), _FILES):
            lines = (f"{name}\0{texts[name]}\0" for name in names[start : start + _FILES])
            archive.writestr(zipfile.ZipInfo(names[start]), "".join(lines), zipfile.ZIP_LZMA)


class KeptAnswers(Mapping[str, str]):
    """The text of the files that come with the package, by name; read as they are asked for.

    A member of the archive holds some files in the order of their names, and has the first's name.
    """

    def __init__(self) -> None:
        with zipfile.ZipFile(_KEPT) as archive:
            self._members = archive.namelist()

    def __getitem__(self, name: str) -> str:
        """Return the text of a file."""
        place = bisect.bisect(self._members, name)
        if not place:
            raise KeyError(name)
        return _load(self._members[place - 1])[name]

    def __iter__(self) -> Iterator[str]:
        """Return the names of all files."""
        return (name for member in self._members for name in _load(member))

    def __len__(self) -> int:
        """Return the number of files."""
        return sum(1 for _ in self)


@functools.cache
def _load(member: str) -> dict[str, str]:
    with zipfile.ZipFile(_KEPT) as archive:  # opened anew: forked processes read too
        *lines, _ = archive.read(member).decode().split("\0")
    return dict(zip(lines[::2], lines[1::2], strict=True))


@functools.cache
def kept_answers() -> Mapping[str, str]:
    """Return the text of the files that come with the package, by name."""
    return KeptAnswers()
