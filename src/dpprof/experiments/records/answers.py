"""Files that come with the package: answers to what the documentation asks.

``make answers`` finds them anew. A capacity counts only where it would come out the same: its code
digest is that of the sources and library versions that are installed. The file of noise multipliers
has that in its name.
"""

import contextlib
import functools
import lzma
from collections.abc import Iterable
from pathlib import Path

from dpprof.system.files import write_atomically

_KEPT = Path(__file__).with_name("answers.xz")
_PRESET = 9 | lzma.PRESET_EXTREME


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
    lines = "".join(f"{name}\0{texts[name]}\0" for name in sorted(texts))
    _KEPT.write_bytes(lzma.compress(lines.encode(), preset=_PRESET))


@functools.cache
def kept_answers() -> dict[str, str]:
    """Return the text of the files that come with the package, by name."""
    *lines, _ = lzma.decompress(_KEPT.read_bytes()).decode().split("\0")
    return dict(zip(lines[::2], lines[1::2], strict=True))
