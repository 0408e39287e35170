"""What is damaged is named, all of it, and does not hold up a partial report."""

from pathlib import Path

import pytest
from factory import make_experiment, make_manifest, write_synthetic
from reading import trust_of

from dpprof.experiments.records.record import ResultError
from dpprof.experiments.records.result import result_path
from dpprof.experiments.records.verdict import verdict_path
from dpprof.results.analysis.collection import collect
from dpprof.results.analysis.tables.build import build_tables
from dpprof.results.report.content import build_document
from dpprof.results.report.rendering.write import render_markdown

EXPERIMENTS = [make_experiment(batch_size=size) for size in range(1, 15)]
MANIFEST = make_manifest(*((experiment, 0) for experiment in EXPERIMENTS))
DAMAGE = [b"{", b"\xff", b"[" * 100_000, b'{"schema_version": 99}']


@pytest.fixture
def paths(tmp_path) -> list[Path]:
    """Results of fourteen experiments."""
    for experiment in EXPERIMENTS:
        write_synthetic(tmp_path, experiment)
    return [result_path(tmp_path, "clean", experiment.id, 0) for experiment in EXPERIMENTS]


def test_all_damaged_files_are_named_at_once(tmp_path, paths) -> None:
    damaged = [*paths[:4], verdict_path(tmp_path, "built-in", "standard")]
    for path, damage in zip(damaged, [*DAMAGE, b"{}"], strict=True):
        path.write_bytes(damage)

    with pytest.raises(ResultError) as caught:
        collect(MANIFEST, tmp_path, partial=False)
    lines = str(caught.value).splitlines()
    assert [line.partition(": ")[0] for line in lines] == [str(path) for path in damaged]


def test_of_many_damaged_files_ten_are_named_and_the_rest_is_counted(tmp_path, paths) -> None:
    for path in paths:
        path.write_bytes(b"{")

    with pytest.raises(ResultError, match=r"^(.*\n){10}and 4 more$"):
        collect(MANIFEST, tmp_path, partial=False)


def test_a_partial_report_leaves_out_what_is_damaged_and_says_why(tmp_path, paths) -> None:
    paths[0].write_bytes(b"[" * 100_000)
    paths[1].unlink()
    tables = build_tables(collect(MANIFEST, tmp_path, partial=True))

    missing = tables["missing"].set_index("experiment_id")["reason"].to_dict()
    why = "is not complete JSON: it was cut or damaged (it is nested too deep)"
    assert missing == {EXPERIMENTS[0].id: why, EXPERIMENTS[1].id: "no result yet"}
    assert len(tables["runs"]) == 12
    document = build_document(tables, [])
    said = trust_of(document)
    assert "This report is partial: 1 planned run has no result yet." in said
    assert "This report is partial: 1 result cannot be trusted and is left out" in said
    markdown = render_markdown(document).replace("\\", "")
    assert f"- {EXPERIMENTS[0].id} clean r0: is not complete JSON" in markdown
    assert f"- {EXPERIMENTS[1].id} clean r0" in markdown


def test_in_a_partial_report_a_method_whose_verdict_is_damaged_is_not_verified(
    tmp_path, paths
) -> None:
    path = verdict_path(tmp_path, "built-in", "standard")
    path.write_bytes(b"{}")

    found = collect(MANIFEST, tmp_path, partial=True)
    row = build_tables(found)["verification"].iloc[0]
    assert row["verified"] is not True
    assert row["reason"].startswith("its verdict file ")
    assert [str(error).partition(": ")[0] for error in found.damaged] == [str(path)]
