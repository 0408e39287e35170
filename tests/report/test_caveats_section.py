"""Few findings are listed, many are left to their table; the first page counts both."""

import pandas as pd
import pytest

from dpprof.results.report.sections.outcomes import tell_caveats
from dpprof.results.report.sections.tables import MAX_ROWS


@pytest.mark.parametrize("count", [0, 1, MAX_ROWS, MAX_ROWS + 1])
def test_caveats_are_listed_one_by_one_as_long_as_they_are_few(count) -> None:
    rows = [("fallback", f"e{number}", "clean", f"finding {number}") for number in range(count)]
    columns = pd.Index(["kind", "experiment_id", "instrument", "finding"])
    blocks = tell_caveats(pd.DataFrame(rows, columns=columns))

    if count > MAX_ROWS:
        assert "61 rows: see results/tables/findings.csv" in blocks[0].text
        return
    found = [row for table in blocks for row in table.rows]
    assert len(found) == count
    assert found[:1] == [("e0 clean", "finding 0")][:count]
