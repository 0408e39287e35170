"""What can be made of a sweep that has ended."""

import zipfile

import pytest
from checkout import Checkout
from scripts import call

pytestmark = pytest.mark.workflow


def test_snakemakes_own_report_carries_reports_figures_and_tables(finished: Checkout) -> None:
    finished.snakemake("--report", "report.zip")

    with zipfile.ZipFile(finished.path / "report.zip") as packed:
        names = packed.namelist()
        ours, page = sorted((name for name in names if name.endswith("report.html")), key=len)[::-1]
        text = packed.read(page).decode()
        assert packed.read(ours) == (finished.path / "results" / "report.html").read_bytes()
    assert "Peak memory over step time, one point per method; lower left is better." in text
    drawn = [path.name for path in (finished.path / "results" / "figures").glob("*.png")]
    tables = [path.name for path in (finished.path / "results" / "tables").glob("*.csv")]
    assert drawn
    assert len(tables) > 10
    for one in (*drawn, *tables):
        assert any(name.endswith(f"/{one}") for name in names), one
    assert "a row is" in text
    assert "an instant of a step" in text
    assert "checks that the" in text


@pytest.mark.slow  # sweeps that end in their report run the same commands
def test_commands_run_alone_on_existing_tables(finished: Checkout) -> None:
    tables, output = finished.path / "results" / "tables", finished.path / "alone"
    files = [f"--output={output}/figures/tradeoff.{kind}" for kind in ("svg", "pdf", "json")]
    for command, options in (
        ("figure", ["--figure=tradeoff", *files]),
        ("report", [f"--output-dir={output}"]),
    ):
        done = call(command, f"--tables={tables}", *options, cwd=finished.path)
        assert done.returncode == 0, done.stderr

    assert (output / "report.pdf").read_bytes().startswith(b"%PDF")
    assert "figures/tradeoff.png" in (output / "report.md").read_text()
    assert "figures/timeline.png" not in (output / "report.md").read_text()
