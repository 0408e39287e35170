"""Reviewed texts, each in a file of a folder ``snapshots`` beside its tests.

Where a sentence changes on purpose, ``REVIEW=1 pytest ...`` writes the new texts; the difference
that git shows is then what is reviewed.
"""

import math
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from dpprof.private.errors import UnsupportedError

TESTS = Path(__file__).parent


def find_file(name: str) -> Path:
    """Return the file of a text, which ``report/a budget`` names."""
    folder, _, case = name.partition("/")
    return TESTS / folder / "snapshots" / f"{case}.txt"


def assert_reviewed(name: str, text: str) -> None:
    """Compare a text with the reviewed one."""
    path = find_file(name)
    if "REVIEW" in os.environ:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8")


def read_cases(name: str) -> list[Any]:
    """Read the cases whose sentences are reviewed; the line of a new one is added by hand."""
    lines = find_file(name).read_text(encoding="utf-8").splitlines()
    numbers = {"nan": math.nan, "inf": math.inf}
    return [eval(line, numbers) for line in lines if not line.startswith(" ")]  # noqa: S307


def refusals_of(
    call: Callable[..., object], *kinds: type[Exception]
) -> Callable[[dict[str, Any]], str]:
    """Return what tells the sentence by which a call with some keywords is refused."""

    def refuse(case: dict[str, Any]) -> str:
        with pytest.raises(kinds or (ValueError, UnsupportedError)) as refused:
            call(**case)
        return str(refused.value)

    return refuse


def assert_sentences(
    name: str, refuse: Callable[[Any], object], cases: Iterable[Any] | None = None
) -> None:
    """Compare what is said of each case, which must be one line, with the reviewed sentences."""
    asked = read_cases(name) if cases is None else cases
    said = [(ascii(case), str(refuse(case))) for case in asked]
    assert said
    assert [line for _, line in said if "\n" in line] == []
    assert_reviewed(name, "".join(f"{case}\n    {line}\n" for case, line in said))
