"""What each rank measured, and what privacy adds to what ranks exchange, from invented results."""

import pytest
from factory import make_experiment, make_memory, tables_of_runs
from reading import table_of

from dpprof.results.report.content import build_document

MIB = 2**20
RANKS = "kind=fsdp,world_size=2"


def exchanged(*sent: tuple[str, str, int]) -> dict:
    """Invent what a step exchanges: collective, phase and bytes."""
    return {
        "communication": [
            {"collective": name, "phase": phase, "calls": 1, "payload_bytes": 2 * size}
            | {"bytes_each_way": size}
            for name, phase, size in sent
        ]
    }


def run(method: str, sent, **others):
    recorded = make_memory({"parameters": MIB}) | exchanged(*sent) | others
    return make_experiment(method=method, parallel=RANKS), "estimate", {"recorded": recorded}


@pytest.fixture
def tables(tmp_path):
    gathered, scattered = ("all-gather", "forward", 2 * MIB), ("reduce-scatter", "clip", MIB)
    part = {"rank": 1, "memory": {"peak_rss_bytes": 77}, "communication": None}
    part |= {"time": {"step_s": [0.5], "median_s": 0.5}, "observed": None, "nonfinite_samples": 0}
    return tables_of_runs(
        tmp_path,
        run("standard", [gathered, scattered]),
        run("flash", [gathered, ("all-gather", "clip", MIB // 2), scattered], ranks=[part]),
        (make_experiment(method="flash"), "estimate", {"recorded": make_memory({"noise": MIB})}),
    )


def test_every_collective_and_every_rank_has_a_row(tables) -> None:
    exchanges, [rank] = tables["communication"], tables["ranks"].to_dict("records")

    assert list(exchanges["bytes_each_way"]) == [2 * MIB, MIB, 2 * MIB, MIB // 2, MIB]
    assert set(exchanges["parallel"]) == {"fsdp x2"}
    assert (rank["rank"], rank["peak_rss_bytes"], rank["median_step_s"]) == (1, 77, 0.5)


def test_what_privacy_adds_is_a_number(tables) -> None:
    rows = tables["experiments"].set_index(["method", "parallel"])

    ranks = rows.xs("fsdp x2", level="parallel")
    assert dict(ranks["sent_bytes"]) == {"standard": 3 * MIB, "flash": 3.5 * MIB}
    assert dict(ranks["sent_beyond_bytes"]) == {"standard": 0, "flash": MIB // 2}
    alone = tables["experiments"].query("parallel.isna()", engine="python")
    assert alone["sent_bytes"].isna().all()


def test_the_report_tells_it(tables) -> None:
    flash, standard = table_of(build_document(tables, []), "Communication")

    assert (flash["sent (MiB)"], flash["beyond standard (MiB)"]) == ("3.50", "0.50")
    assert (standard["sent (MiB)"], standard["beyond standard (MiB)"]) == ("3.00", "0.00")
    assert flash["model"].endswith(", fsdp x2")
