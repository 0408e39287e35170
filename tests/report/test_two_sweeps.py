"""Two sweeps side by side: the answer of each, then what changed in the words of compare."""

import json

import pytest
from factory import make_experiment, make_memory, tables_of_runs
from scripts import call

from dpprof.results.report.content import build_document
from dpprof.results.report.rendering.write import write_report

MIB = 2**20


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two folders of results, of which the second needs 1 MiB more; the first has a report."""
    root = tmp_path_factory.mktemp("sides")
    for side, more in (("a", 0), ("b", MIB)):
        runs = [
            (
                make_experiment(method=method),
                "estimate",
                {"recorded": make_memory({"parameters": 8 * MIB, "noise": 2 * MIB + more})},
            )
            for method in ("standard", "flash-bk")
        ]
        tables = tables_of_runs(root / side, *runs)
        if side == "a":
            write_report(build_document(tables, []), root / side / "results")
    return root


def test_both_answers_and_what_changed_are_told(folder) -> None:
    done = call("report", "a/results", "b/results", "--output-dir=both", cwd=folder)
    assert done.returncode == 0, done.stderr
    told = json.loads((folder / "both" / "report.json").read_text())
    titles = [section["title"] for section in told["sections"]]

    assert titles == ["The answer of a/results", "Worse", "What was compared"]
    assert told["headline"][0].startswith("b/results against a/results: ")
    assert "figures are worse" in told["headline"][0]
    [table] = told["sections"][1]["blocks"]
    rows = [dict(zip(table["header"], row, strict=True)) for row in table["rows"]]
    noise = next(row for row in rows if row["figure"] == "noise at the peak")
    assert (noise["baseline"], noise["candidate"]) == ("2,097,152 bytes", "3,145,728 bytes")
    assert (folder / "both" / "report.pdf").read_bytes().startswith(b"%PDF")


@pytest.mark.parametrize(
    "options", [["a/results"], [], ["a/results", "b/results", "--tables=a/results/tables"]]
)
def test_anything_but_tables_or_two_folders_is_refused(folder, options) -> None:
    done = call("report", *options, "--output-dir=no", cwd=folder)

    assert done.returncode != 0
    assert "give either --tables, or two folders of results to compare" in done.stderr
    assert not (folder / "no").exists()
