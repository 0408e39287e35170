"""Few findings are listed, many are counted by kind."""

import pandas as pd
import pytest

from dpprof.report.sections.caveats import tell_caveats
from dpprof.report.sections.tables import MAX_ROWS


def findings_of(*kinds: tuple[str, int]) -> pd.DataFrame:
    """Findings of each kind, two of each experiment."""
    rows = [
        {
            "kind": kind,
            "experiment_id": f"{kind}-{number // 2}",
            "instrument": ("clean", "memory")[number % 2],
            "finding": f"{kind} finding {number}",
        }
        for kind, count in kinds
        for number in range(count)
    ]
    return pd.DataFrame(rows, columns=["kind", "experiment_id", "instrument", "finding"])


@pytest.mark.parametrize("count", [0, 1, MAX_ROWS])
def test_few_caveats_are_listed_one_by_one(count) -> None:
    found = [row for table in tell_caveats(findings_of(("fallback", count))) for row in table.rows]

    assert len(found) == count
    if found:
        assert found[0] == ("fallback-0 clean", "fallback finding 0")


def test_many_caveats_are_counted_and_the_first_are_named() -> None:
    (table,) = tell_caveats(findings_of(("unheard-of", 3), ("contended", 2_402)))

    assert "results/tables/findings.csv lists every one" in table.caption
    assert table.header == ("caveat", "findings", "experiments", "the first", "for example")
    assert table.rows == (
        (
            "other processes kept cores busy, so times are too long",
            "2,402",
            "1,201",
            "contended-0, contended-1, contended-2 and 1,198 more",
            "contended finding 0",
        ),
        (
            "unheard-of",
            "3",
            "2",
            "unheard-of-0 and unheard-of-1",
            "unheard-of finding 0",
        ),
    )
