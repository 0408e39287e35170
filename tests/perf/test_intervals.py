"""Intervals are calibrated by leaving whole sources out, and the page shows what is computed."""

import math
from pathlib import Path

import pytest

import intervals
from dpprof.predict.step_time.intervals import ALONE, COMPARED, IMAGES, SOURCES
from dpprof.predict.step_time.op_time import Z_90
from intervals import Number, find_least, find_lone, judge, read_numbers, split, tabulate

PAGE = Path(intervals.__file__).with_suffix(".md").read_text(encoding="utf-8")


def numbers(source: str, *errors: float, spread: float = 0.0) -> list[Number]:
    return [Number("texts", source, error, spread) for error in errors]


@pytest.fixture(scope="module")
def published() -> list[Number]:
    return read_numbers()


def test_the_page_shows_what_is_computed(published) -> None:
    assert f"{intervals.__doc__}\n{tabulate(published)}\n" == PAGE


def test_a_source_of_many_rows_counts_as_one() -> None:
    """Of the two sources one is far off, so its rows need more than the hundred others do."""
    rows = numbers("many", *[0.0] * 100) + numbers("few", Z_90 * 0.3)

    assert find_least(rows) == 0.3
    assert find_least(numbers("both", *(number.error for number in rows))) == 0.0


def test_an_interval_already_as_wide_needs_no_more() -> None:
    assert find_least(numbers("a", Z_90 * 0.3, spread=0.3)) == 0.0
    assert find_least(numbers("a", Z_90 * 0.49, spread=0.3)) == pytest.approx(
        math.sqrt(0.49**2 - 0.3**2), abs=0.01
    )


def test_no_row_has_a_part_in_its_own_interval() -> None:
    off, near = judge(numbers("off", 1.0) + numbers("near", 0.0))

    assert (off.more, off.inside) == (0.0, 0)
    assert (near.more, near.inside) == (pytest.approx(1 / Z_90, abs=0.01), 1)


def test_estimates_are_as_wide_as_left_out_sources_need(published) -> None:
    times = [number for number in published if number.group in ("texts", "images")]
    texts, images = (
        [number for number in times if number.group == group] for group in ("texts", "images")
    )

    assert max(one.more for one in judge(times)) == SOURCES
    assert find_least(images) == IMAGES
    assert max(map(find_least, split(find_lone(texts)).values())) == ALONE
    assert {number.kind for number in texts} == COMPARED


def test_most_rows_of_sources_that_are_left_out_are_inside(published) -> None:
    for groups in (("texts", "images"), ("stated",)):
        some = [number for number in published if number.group in groups]
        assert sum(one.inside for one in judge(some)) >= 0.85 * len(some)
