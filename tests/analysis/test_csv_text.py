"""Whatever a text begins with, no spreadsheet runs it, and readers get it back."""

import csv

import pandas as pd
import pytest
from factory import make_experiment, make_memory, write_manifest, write_runs

from dpprof.ask.commands.tables import main
from dpprof.results.analysis.tables.frames import TableFolder, read_table, write_frame, write_rows

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
    for written in (write_rows([frame.columns, *frame.to_numpy()]), write_frame("findings", frame)):
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


def test_what_a_run_says_reaches_figures_and_report_as_it_was(tmp_path) -> None:
    recorded = make_memory({"parameters": 8})
    recorded["memory"]["timeline"]["op"] = ["@x", "aten::mm", "-x"]
    planned = write_runs(
        tmp_path,
        (make_experiment(method="flash"), "clean", {"outcome": "crashed", "message": "=1+1"}),
        (make_experiment(method="standard"), "memory", {"recorded": recorded}),
    )
    manifest, tables = write_manifest(tmp_path, planned), tmp_path / "tables"
    main([f"--manifest={manifest}", f"--output-dir={tables}"])

    told = {name: (tables / f"{name}.csv").read_text() for name in ("runs", "timeline")}
    assert ",'=1+1," in told["runs"]
    assert [text in told["timeline"] for text in (",'@x,", ",aten::mm,", ",'-x,")] == [True] * 3
    read = TableFolder(tables)
    assert read["runs"]["error_message"].dropna().tolist() == ["=1+1"]
    assert read["timeline"]["op"].tolist() == ["@x", "aten::mm", "-x"]
