"""Results that come with the package: capacities that the documentation asks for.

``make answers`` finds them anew. One counts only where it would come out the same: its code digest
is that of the sources and library versions that are installed.
"""

import functools
import lzma
from collections.abc import Iterable
from pathlib import Path

_KEPT = Path(__file__).with_name("answers.xz")
_PRESET = 9 | lzma.PRESET_EXTREME


def keep_answers(results: Iterable[Path]) -> None:
    """Keep the text of result files, by name, in place of those that are kept now."""
    texts = {path.name: path.read_text(encoding="utf-8") for path in results}
    lines = "".join(f"{name}\0{texts[name]}\0" for name in sorted(texts))
    _KEPT.write_bytes(lzma.compress(lines.encode(), preset=_PRESET))


@functools.cache
def kept_answers() -> dict[str, str]:
    """Return the text of the result files that come with the package, by name."""
    *lines, _ = lzma.decompress(_KEPT.read_bytes()).decode().split("\0")
    return dict(zip(lines[::2], lines[1::2], strict=True))
