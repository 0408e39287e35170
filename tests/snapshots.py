"""Reviewed texts, each in a file of a folder ``snapshots`` beside its tests.

Where a sentence changes on purpose, ``REVIEW=1 pytest ...`` writes the new texts; the difference
that git shows is then what is reviewed.
"""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

TESTS = Path(__file__).parent


def assert_reviewed(name: str, text: str) -> None:
    """Compare a text with the reviewed one, as ``report/a budget`` names it."""
    folder, _, case = name.partition("/")
    path = TESTS / folder / "snapshots" / f"{case}.txt"
    if "REVIEW" in os.environ:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def assert_sentences(name: str, refuse: Callable[[Any], object], cases: Iterable[Any]) -> None:
    """Compare what is said of each case, which must be one line, with the reviewed sentences."""
    said = [(ascii(case)[:100].rstrip(), str(refuse(case))) for case in cases]
    assert [line for _, line in said if "\n" in line] == []
    assert_reviewed(name, "".join(f"{case}\n    {line}\n" for case, line in said))
