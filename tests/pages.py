"""How the pages of a report are laid out: python tests/pages.py results/report.pdf."""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pypdf import PageObject, PdfReader

MOST_WHITE = 1 / 3
MOST_PAGES = 6

_FOOT = 0.06
"""The share of a page below which its number stands."""


Matrix = tuple[float, ...]


def multiply(first: Matrix, then: Matrix) -> Matrix:
    """Return the transformation that does one, then another."""
    a, b, c, d, e, f = first
    g, h, i, j, k, m = then
    return (
        a * g + b * i,
        a * h + b * j,
        c * g + d * i,
        c * h + d * j,
        e * g + f * i + k,
        e * h + f * j + m,
    )


def find_white(page: PageObject) -> float:
    """Return the highest empty stripe of a page, as a share of its height.

    Text and pictures count, lines do not; margins do, and the page's number does not.
    """
    height = float(page.mediabox.height)
    inked = sorted(find_ink(page))
    reached, white = height * _FOOT, 0.0
    for low, high in inked:
        white = max(white, low - reached)
        reached = max(reached, high)
    return max(white, height - reached) / height


def find_ink(page: PageObject) -> Iterator[tuple[float, float]]:
    """Yield the lower and upper ends of texts and pictures that a page sets itself.

    What a picture sets has coordinates of its own, so only the picture's box counts.
    """
    at: Matrix = (1, 0, 0, 1, 0, 0)
    saved, line, size = [], at, 8.0
    contents: Any = page.get_contents()
    for operands, operator in contents.operations if contents is not None else ():
        if operator == b"q":
            saved.append(at)
        elif operator == b"Q":
            at = saved.pop()
        elif operator == b"cm":
            at = multiply(tuple(map(float, operands)), at)
        elif operator == b"Tf":
            size = float(operands[1])
        elif operator == b"Tm":
            line = tuple(map(float, operands))
        elif operator in (b"Tj", b"TJ"):
            place = multiply(line, at)
            yield place[5], place[5] + abs(place[3]) * size
        elif operator == b"Do":
            picture: Any = page["/Resources"]["/XObject"][operands[0]]  # type: ignore[index]
            placed = multiply(tuple(map(float, picture.get("/Matrix", (1, 0, 0, 1, 0, 0)))), at)
            low, high = map(float, picture["/BBox"][1::2]) if "/BBox" in picture else (0.0, 1.0)
            ends = sorted(placed[3] * y + placed[5] for y in (low, high))
            yield ends[0], ends[1]


def find_appendix(path: Path) -> int:
    """Return the number of the page on which the appendix begins, from 1."""
    pages = PdfReader(path).pages
    lines = ((n, page.extract_text().splitlines()) for n, page in enumerate(pages, 1))
    return next(n for n, page in lines if any(line.strip() == "Appendix" for line in page))


def find_parted(path: Path) -> list[str]:
    """Return the figures of report.json whose sentence and caption are on no page together."""
    sections = json.loads(path.with_suffix(".json").read_text(encoding="utf-8"))["sections"]
    pictures = [b for one in sections for b in one["blocks"] if b["kind"] == "picture"]
    pages = [_squeeze(page.extract_text()) for page in PdfReader(path).pages]
    texts = {one["name"]: [_squeeze(one["said"]), _squeeze(one["caption"])] for one in pictures}
    return [
        name
        for name, both in texts.items()
        if not any(all(text in page for text in both) for page in pages)
    ]


def _squeeze(text: str) -> str:
    return re.sub(r"[\s\u200b]", "", text)


def main(path: Path) -> None:
    """Fail where a page but the last is too empty, a figure is parted, or the appendix is late."""
    white = [find_white(page) for page in PdfReader(path).pages]
    print(f"{path}: white", ", ".join(f"{share:.0%}" for share in white))
    empty = [n for n, share in enumerate(white[:-1], 1) if share > MOST_WHITE]
    began = find_appendix(path)
    print(f"{path}: the appendix begins on page {began}")
    parted = find_parted(path)
    if empty or parted or began > MOST_PAGES + 1:
        sys.exit(
            f"{path}: too empty are pages {empty}; parted from their sentences are {parted}; the "
            f"appendix begins on page {began}"
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
