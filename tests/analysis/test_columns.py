from pathlib import Path

import pytest
from factory import make_experiment, tables_of_runs

from dpprof.results.analysis.tables.columns import TABLES
from dpprof.results.analysis.tables.frames import make_frame
from dpprof.results.analysis.tables.table import integer, list_columns, number, text, write_page

NUMBERS = Path(__file__).parents[2] / "docs" / "numbers"
FITS = {
    "text": lambda value: isinstance(value, str),
    "integer": lambda value: float(value).is_integer(),
    "number": lambda value: float(value) == value and not isinstance(value, bool),
    "boolean": lambda value: value in (True, False),
}


def test_the_lists_of_columns_are_in_step_with_the_declarations() -> None:
    assert (NUMBERS / "tables.md").read_text() == write_page(TABLES), "run: make schemas"
    columns = (NUMBERS / "data" / "columns.csv").read_text()
    assert columns == list_columns(TABLES), "run: make schemas"


def test_the_values_of_tables_are_of_the_declared_kinds(tmp_path) -> None:
    tables = tables_of_runs(tmp_path, (make_experiment(), "clean", {}))

    for name, table in tables.items():
        for column in TABLES[name].columns.values():
            odd = [one for one in table[column.name].dropna() if not FITS[column.kind](one)]
            assert odd == [], f"{name}.{column.name}"


def test_units_stand_in_names() -> None:
    assert number("flops_per_s", "").unit == "FLOP/s"
    assert integer("bytes", "").unit == "B"
    assert number("step_low_s", "").unit == "s"
    assert number("step_ratio", "").unit == text("seconds", "").unit == ""


def test_a_column_that_is_not_declared_is_refused() -> None:
    with pytest.raises(ValueError, match="the table steps declares no column step_ms"):
        make_frame("steps", [{"step_s": 1.0, "step_ms": 1000.0}])
