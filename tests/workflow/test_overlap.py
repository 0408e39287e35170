"""Nothing ever runs beside a measurement."""

import datetime as dt
import itertools
import json

import pytest
from checkout import TABLES, Checkout

pytestmark = pytest.mark.workflow


def intervals(checkout: Checkout) -> list[tuple[dt.datetime, dt.datetime]]:
    found = []
    for _, content in checkout.results().values():
        result = json.loads(content)
        start = dt.datetime.fromisoformat(result["started_at"])
        found.append((start, start + dt.timedelta(seconds=result["wall_s"])))
    return sorted(found)


def test_replicates_are_interleaved(checkout: Checkout) -> None:
    """All of replicate 0 run before any of replicate 1, whatever Snakemake would prefer."""
    checkout.edit("config/config.yaml", "batch_size: 1", "batch_size: 1\n    replicates: 2")
    checkout.snakemake(TABLES)

    results = [json.loads(content) for _, content in checkout.results().values()]
    ordered = sorted(results, key=lambda result: result["started_at"])
    assert [result["replicate"] for result in ordered] == [0, 0, 0, 1, 1]


def test_ceilings_are_measured_before_any_experiment(checkout: Checkout) -> None:
    checkout.snakemake(TABLES)
    (path,) = (checkout.path / "results" / "ceilings").iterdir()
    ceilings = json.loads(path.read_text())
    start = dt.datetime.fromisoformat(ceilings["started_at"])

    assert start + dt.timedelta(seconds=ceilings["wall_s"]) <= intervals(checkout)[0][0]


@pytest.mark.parametrize(
    "options",
    [
        ("--cores", "4"),
        ("--cores", "4", "--resources", "mem_mb=1000"),
        # Snakemake's own means switched off: only the lock is left.
        ("--cores", "4", "--resources", "mem_mb=1000", "--set-threads", "profile=1"),
    ],
    ids=["cores", "resources", "lock alone"],
)
def test_no_two_cpu_experiments_overlap(checkout: Checkout, options: tuple[str, ...]) -> None:
    checkout.snakemake(TABLES, *options)

    found = intervals(checkout)
    assert len(found) == 3
    for earlier, later in itertools.pairwise(found):
        assert earlier[1] <= later[0]
