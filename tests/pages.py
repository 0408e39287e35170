"""How the pages of a report are laid out: python tests/pages.py results/report.pdf."""

import json
import re
import sys
from pathlib import Path
from typing import Any

from pypdf import PageObject, PdfReader

MOST_WHITE = 1 / 3
MOST_PAGES = 6


def find_white(page: PageObject) -> float:
    """Return the highest empty stripe of a page, as a share of its height.

    Text and pictures count, lines do not; margins do.
    """
    height = float(page.mediabox.height)
    inked: list[tuple[float, float]] = []

    def see_text(text: str, cm: Any, tm: Any, _font: Any, size: float | None) -> None:
        if text.strip():
            base = cm[1] * tm[4] + cm[3] * tm[5] + cm[5]
            inked.append((base, base + abs(cm[3] * tm[3]) * float(size or 8)))

    def see_picture(operator: bytes, operands: Any, cm: Any, _tm: Any) -> None:
        if operator == b"Do":
            picture = page["/Resources"]["/XObject"][operands[0]]  # type: ignore[index]
            low, high = picture["/BBox"][1::2] if "/BBox" in picture else (0, 1)
            ends = sorted(float(cm[3]) * float(y) + float(cm[5]) for y in (low, high))
            inked.append((ends[0], ends[1]))

    page.extract_text(visitor_text=see_text, visitor_operand_before=see_picture)
    reached, white = 0.0, 0.0
    for low, high in sorted(inked):
        white = max(white, low - reached)
        reached = max(reached, high)
    return max(white, height - reached) / height


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
