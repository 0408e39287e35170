"""Whatever a text begins with, no spreadsheet runs it, and readers get it back."""

import csv

import pandas as pd
import pytest

from dpprof.results.analysis.tables.frames import read_table, write_frame

WRITTEN = {
    "=1+1": "'=1+1",
    "+1": "'+1",
    "-0.5": "'-0.5",
    "@x": "'@x",
    "\tx": "'\tx",
    "\rx": "'\rx",
    "'=1": "''=1",
    "''-": "'''-",
    "'x": "'x",
    "x=1": "x=1",
    "x\r=1": "x\r=1",
    "x\r\n=1": "x\r\n=1",
    **{text: text for text in ("null", "12", "NA", "1234567e8901", 'a,b\n"c"')},
}
"""Cells by text."""


@pytest.mark.parametrize("text", WRITTEN)
def test_a_text_is_one_cell_that_is_no_formula(tmp_path, text) -> None:
    path = tmp_path / "x.csv"
    frame = pd.DataFrame({"kind": ["x"], "finding": [text]})
    written = write_frame("findings", frame)
    path.write_text(written, encoding="utf-8", newline="")
    with path.open(newline="") as file:
        assert list(csv.reader(file)) == [["kind", "finding"], ["x", WRITTEN[text]]]
    # What takes a carriage return for the end of a line finds it between quotation marks.
    assert "\r" not in "".join(written.split('"')[::2])


def test_texts_are_read_as_they_were_and_numbers_stay_numbers(tmp_path) -> None:
    path = tmp_path / "findings.csv"
    frame = pd.DataFrame({"finding": [*WRITTEN, None], "kind": None, "other": -0.5})
    path.write_text(write_frame("findings", frame), encoding="utf-8", newline="")
    found = read_table(path)

    assert found["finding"].dropna().tolist() == list(WRITTEN)
    assert found["finding"].isna().tolist() == [False] * len(WRITTEN) + [True]
    assert found["kind"].isna().all()
    assert found["other"].tolist() == [-0.5] * len(frame)
    assert path.read_text(encoding="utf-8").splitlines()[-1] == ",,-0.5"
