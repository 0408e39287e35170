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


def test_all_of_replicate_0_run_after_the_ceilings_and_before_replicate_1(checkout) -> None:
    """Whatever Snakemake would prefer, and with cores to spare."""
    checkout.edit("config/config.yaml", "batch_size: 1", "batch_size: 1\n    replicates: 2")
    checkout.snakemake(TABLES, "--cores", "4")

    results = [json.loads(content) for _, content in checkout.results().values()]
    ordered = sorted(results, key=lambda result: result["started_at"])
    assert [result["replicate"] for result in ordered] == [0, 0, 0, 1, 1]
    (path,) = (checkout.path / "results" / "ceilings").iterdir()
    ceilings = json.loads(path.read_text())
    start = dt.datetime.fromisoformat(ceilings["started_at"])
    found = intervals(checkout)
    assert start + dt.timedelta(seconds=ceilings["wall_s"]) <= found[0][0]
    for earlier, later in itertools.pairwise(found):
        assert earlier[1] <= later[0]


@pytest.mark.slow  # tests/launch/test_supervisor.py has two runs at once without a sweep
def test_the_lock_alone_keeps_cpu_experiments_apart(checkout: Checkout) -> None:
    """Snakemake's own means are switched off."""
    options = ("--cores", "4", "--resources", "mem_mb=1000", "--set-threads", "profile=1")
    checkout.snakemake(TABLES, *options)

    found = intervals(checkout)
    assert len(found) == 3
    for earlier, later in itertools.pairwise(found):
        assert earlier[1] <= later[0]
