"""The table of timelines, written run by run, is the one that a frame would write."""

import io
from pathlib import Path

import pandas as pd
import pytest
from factory import make_capacity, make_experiment, make_memory, write_manifest, write_runs

from dpprof.ask.commands.tables import main
from dpprof.experiments.planning.planner import read_manifest
from dpprof.results.analysis.collection import collect
from dpprof.results.analysis.tables.axes import RUN_KEY
from dpprof.results.analysis.tables.build import begin_timeline, build_tables
from dpprof.results.analysis.tables.frames import TableFolder, rows_of


@pytest.fixture
def manifest(tmp_path) -> Path:
    """Write runs with and without timelines, of which some know operators and times."""
    runs = []
    for batch in (1, 2, 3):
        experiment = make_experiment(batch_size=batch)
        recorded = make_memory({"parameters": 2**20, "noise": 1000 * batch + 1})
        if batch == 2:
            recorded["memory"]["timeline"] |= {
                "elapsed_s": [0.0, 1e-07, 0.1 + 0.2],
                "op": [None, "aten::mm, out", 'a "quoted" name'],
            }
        runs.append((experiment, "estimate", {"recorded": recorded}))
        runs.append((experiment, "clean", {"phases_s": {"forward": [0.1, 0.4], "step": []}}))
    target = make_experiment(device="cuda", target="h200")
    found = make_capacity() | {"memory": recorded["memory"], "io": recorded["io"]}
    runs.append((target, "capacity", {"recorded": found}))
    return write_manifest(tmp_path, write_runs(tmp_path, *runs))


def test_tables_written_while_reading_have_the_bytes_of_whole_ones(tmp_path, manifest) -> None:
    main([f"--manifest={manifest}", f"--output-dir={tmp_path / 'tables'}"])

    whole = build_tables(collect(read_manifest(manifest), tmp_path, partial=False))
    assert len(whole["timeline"]) == 9  # three runs of three instants; no capacity
    for name, table in whole.items():
        written = (tmp_path / "tables" / f"{name}.csv").read_text(encoding="utf-8")
        assert written == table.to_csv(index=False), name


def test_a_result_that_was_told_is_kept_without_its_timeline(tmp_path, manifest) -> None:
    file = io.BytesIO()
    planned = read_manifest(manifest)
    found = collect(planned, tmp_path, partial=False, on_result=begin_timeline(file)).runs

    assert len(file.getvalue().splitlines()) == 10
    assert all(r.memory is None or r.memory.timeline is None for _, r in found)
    one, same = (r for _, r in found if r.experiment.batch_size == 1)
    assert one.experiment is same.experiment
    assert one.provenance is same.provenance


def test_a_damaged_result_leaves_the_last_timeline(tmp_path, manifest) -> None:
    tables = tmp_path / "tables"
    main([f"--manifest={manifest}", f"--output-dir={tables}"])
    before = (tables / "timeline.csv").read_bytes()
    damaged = next(tmp_path.glob("results/clean/*.json"))
    damaged.write_bytes(b"{")
    with pytest.raises(SystemExit):
        main([f"--manifest={manifest}", f"--output-dir={tables}"])

    assert (tables / "timeline.csv").read_bytes() == before
    assert not list(tables.glob(".*"))


@pytest.mark.parametrize("rows", [1, 2, 100])
def test_rows_of_some_runs_are_those_of_the_whole_table(
    tmp_path, manifest, rows, monkeypatch
) -> None:
    main([f"--manifest={manifest}", f"--output-dir={tmp_path / 'tables'}"])
    monkeypatch.setattr("dpprof.results.analysis.tables.frames._PART", rows)
    whole = TableFolder(tmp_path / "tables")["timeline"]
    runs = [tuple(key) for key in whole[RUN_KEY].drop_duplicates().to_numpy()][1:]

    wanted = whole[whole["experiment_id"] != whole["experiment_id"].iloc[0]]
    for tables in (TableFolder(tmp_path / "tables"), {"timeline": whole}):
        found = rows_of(tables, "timeline", runs).reset_index(drop=True)
        pd.testing.assert_frame_equal(found, wanted.reset_index(drop=True), check_dtype=False)
    assert rows_of(TableFolder(tmp_path / "tables"), "timeline", []).empty
