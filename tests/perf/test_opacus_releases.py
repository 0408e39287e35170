"""Changes between releases, by part, and the committed tables, which have every method."""

import importlib.metadata
import re
from pathlib import Path

import pytest
from factory import CPU, MICRO, make_memory, write_synthetic

import opacus_releases
from dpprof.experiments.config import registry
from dpprof.experiments.config.validation import InputError
from dpprof.results.analysis.gate.folders import read_results_folder
from release_tables import (
    PLACES,
    QUANTITIES,
    Sweep,
    tabulate,
    tell_changes,
    tell_failures,
)

SWEEP = Sweep(("flash", "opacus-hooks"), {"model": MICRO, "batch_size": 2, "seq_len": 4})
COMMITTED = Path(opacus_releases.__file__).with_suffix(".md").read_text(encoding="utf-8")


def write_release(folder: Path, release: str, hooks_peak: int = 100, **hooks):
    """Write what all methods did under a release; ``hooks`` is of opacus-hooks alone."""
    packages = {"packages": {"torch": "0", "opacus": release, "dpprof": "0"}}
    for place in PLACES:
        for method in SWEEP.methods:
            is_hooks = method == "opacus-hooks"
            at_peak = {"parameters": 100, "noise": hooks_peak - 100 if is_hooks else 0}
            write_synthetic(
                folder,
                SWEEP.experiment(place, method),
                instrument=place.instrument,
                recorded=make_memory(at_peak),
                provenance=packages,
                **(hooks if is_hooks else {}),
            )
    return read_results_folder(folder)


def test_changes_are_told_by_part_and_methods_without_any_are_listed(tmp_path) -> None:
    before = write_release(tmp_path / "a", "1.0", hooks_peak=1000)
    after = write_release(tmp_path / "b", "1.1", hooks_peak=1200)
    changed, same = tell_changes(before, after, SWEEP)

    assert same == ["flash"]
    ((rows, methods),) = changed.items()
    assert methods == ["opacus-hooks"]
    peak = "+200 (+20.00 %)"
    assert rows == (("**Peak**", peak, peak), ("noise", "+200", "+200"))


def test_tables_have_every_method_and_mark_what_changed(tmp_path) -> None:
    peaks = {"1.0": 2**20, "1.1": 2**20, "1.2": 2**21}
    folders = {r: write_release(tmp_path / r, r, hooks_peak=peak) for r, peak in peaks.items()}
    lines = list(tabulate(folders, SWEEP))

    assert len(lines) == len(PLACES) * len(QUANTITIES) * (3 + len(SWEEP.methods))
    assert lines.count("| method | 1.0 | 1.1 | 1.2 |") == len(PLACES) * len(QUANTITIES)
    assert lines.count("| `opacus-hooks` | 1.00 | 1.00 | **2.00** |") == len(PLACES)


def test_failures_are_shown_with_their_reason_and_are_no_change(tmp_path) -> None:
    reason = "x cannot be imported: ImportError: cannot import name 'X' from 'opacus' (/tmp/o.py)"
    folders = {
        "1.0": write_release(tmp_path / "a", "1.0", outcome="crashed", message=reason),
        "1.1": write_release(tmp_path / "b", "1.1"),
    }

    assert "| `opacus-hooks` | crashed | 0.00 |" in list(tabulate(folders, SWEEP))
    (told,) = tell_failures(folders)
    why = "`ImportError: cannot import name 'X' from 'opacus'`"
    assert told == f"* `opacus-hooks` with Opacus 1.0: crashed, {why}"
    assert tell_changes(*folders.values(), SWEEP) == ({}, ["flash"])


def test_results_of_another_machine_are_refused(tmp_path) -> None:
    before = write_release(tmp_path / "a", "1.0")
    after = write_release(tmp_path / "b", "1.1", device={**CPU, "name": "another"})

    with pytest.raises(InputError, match=r"synthetic cpu.* in the baseline and another"):
        tell_changes(before, after, SWEEP)


def test_results_of_another_release_are_refused(tmp_path) -> None:
    write_release(tmp_path, "1.0")
    installed = importlib.metadata.version("opacus")

    with pytest.raises(SystemExit, match=f"was run with Opacus 1.0, not {installed}"):
        opacus_releases.run_release(installed, tmp_path, Sweep((), {}))


@pytest.mark.slow
def test_the_script_runs_under_an_installed_release(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(opacus_releases, "PLACES", PLACES[1:])
    release = importlib.metadata.version("opacus")
    sweep = Sweep(("opacus-ew",), {"model": "tiny", "batch_size": 2, "seq_len": 8})
    found = opacus_releases.run_release(release, tmp_path, sweep)

    result = sweep.find(found, PLACES[1], "opacus-ew")
    assert result.outcome == "ok"
    assert result.provenance["packages"]["opacus"] == release


Cells = dict[str, list[str]]
"""The cells of a table's rows after the first, by that."""


def read_rows(text: str) -> Cells:
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines()]
    return {name: cells for name, *cells in rows if not name.startswith("---")}


TOTALS = {
    (quantity, place): read_rows(table)
    for quantity, place, table in re.findall(
        r"^### (\S.*) \(\w+\), (.+)\n\n((?:\|.+\n)+)", COMMITTED, re.MULTILINE
    )
}
"""The committed tables."""

CHANGES: dict[str, str] = dict(
    re.findall(r"^### \S+ to (\S+)\n((?:(?!###).*\n)+)", COMMITTED, re.MULTILINE)
)
"""What is committed of each release."""


def test_the_committed_tables_have_all_methods_under_all_releases() -> None:
    own = [name for name in registry.names("methods") if registry.is_own("methods", name)]

    assert set(TOTALS) == {(q.name, place.title) for q in QUANTITIES for place in PLACES}
    for rows in TOTALS.values():
        assert rows.pop("method") == list(opacus_releases.RELEASES)
        assert list(rows) == [f"`{method}`" for method in own]
        assert all(len(cells) == len(opacus_releases.RELEASES) for cells in rows.values())
    assert list(CHANGES) == list(opacus_releases.RELEASES[1:])
