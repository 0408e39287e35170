"""A sweep ends in its report wherever its results are, and whether anybody listens or not."""

import os
import pty
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkout import TABLES, Checkout, wait_for

pytestmark = pytest.mark.workflow


@pytest.fixture
def elsewhere(tmp_path: Path) -> Iterator[Path]:
    """A folder on another file system, where this machine has one in memory."""
    memory = Path("/dev/shm")  # noqa: S108 (only where it is)
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as folder:
        yield Path(folder) / "run7"


def snakemake_that_loses_its_terminal(checkout: Checkout) -> int:
    """Close the terminal after the first result, of a shell that activated no environment."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "snakemake"],
        cwd=checkout.path,
        env=checkout._environment | {"PATH": "/usr/local/bin:/usr/bin:/bin"},
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    before = checkout.results()
    wait_for(lambda: checkout.results() != before or process.poll() is not None)
    os.close(ours)
    return process.wait(timeout=300)


def test_linked_results_a_closed_terminal_and_no_path_cost_no_report(
    finished: Checkout, elsewhere: Path
) -> None:
    results = finished.path / "results"
    for path in (*results.glob("clean/*hooks*"), *results.glob("report.*")):
        path.unlink()
    shutil.rmtree(results / "verify")
    shutil.rmtree(results / "plan")
    (results / "plan" / "progress.jsonl").mkdir(parents=True)
    shutil.move(results, elsewhere)
    results.symlink_to(elsewhere)

    assert snakemake_that_loses_its_terminal(finished) == 0
    assert results.is_symlink()
    assert (elsewhere / "report.pdf").read_bytes().startswith(b"%PDF")
    assert set(finished.table("runs")["outcome"]) == {"ok"}
    verdicts = sorted(path.stem for path in (elsewhere / "verify").glob("*.json"))
    assert verdicts == ["built-in-opacus-hooks", "built-in-standard"]
    for verdict in verdicts:
        log = elsewhere / "logs" / "verify" / f"{verdict}.log"
        assert f"{verdict.removeprefix('built-in-')} on built-in: verified" in log.read_text()


@pytest.mark.slow
def test_on_a_terminal_that_is_gone_already_nothing_begins(checkout: Checkout) -> None:
    ours, theirs = pty.openpty()
    os.close(ours)
    process = subprocess.Popen(
        [sys.executable, "-m", "snakemake"],
        cwd=checkout.path,
        env=checkout._environment,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)

    assert process.wait(timeout=300) != 0
    assert checkout.results() == {}
    checkout.snakemake(TABLES)
    assert set(checkout.table("runs")["outcome"]) == {"ok"}
