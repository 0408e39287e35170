import pytest
from factory import make_experiment, make_memory, tables_of_runs

from dpprof.experiments.config.datasheets import H200
from dpprof.results.analysis.selection import choose_runs, compose_peaks

GHOST = make_experiment(method="opacus-ghost")
HOOKS = make_experiment(method="opacus-hooks")
ON_H200 = make_experiment(method="opacus-hooks", device="cuda", target="h200")
SMALL = {"memory_bytes": "1GiB", "flops_per_s": 1e12, "bandwidth_bytes_per_s": 1e11}
ON_SMALL = make_experiment(method="opacus-hooks", device="cuda", target=SMALL)
ON_CPU = make_experiment(method="opacus-hooks", target="cpu")

KEPT = [
    # Experiment, instrument, bytes of parameters at the peak
    (GHOST, "estimate", 100),
    (GHOST, "memory", 200),
    (HOOKS, "estimate", 300),
    (ON_H200, "estimate", 400),
    (ON_SMALL, "estimate", 500),
    (ON_CPU, "estimate", 600),
]


@pytest.fixture
def tables(tmp_path):
    recorded = {size: make_memory({"parameters": size, "noise": 1}) for _, _, size in KEPT}
    runs = [(experiment, name, {"recorded": recorded[size]}) for experiment, name, size in KEPT]
    return tables_of_runs(tmp_path, *runs)


def test_recorded_memory_stands_for_its_experiment_before_an_estimate(tables) -> None:
    told = compose_peaks(tables).set_index("experiment_id")

    assert told.loc[GHOST.id, ["instrument", "parameters"]].tolist() == ["memory", 200]
    assert told.loc[HOOKS.id, ["instrument", "parameters"]].tolist() == ["estimate", 300]
    assert (told["noise"] == 1).all()
    assert (told["gradients"] == 0).all()
    assert len(told) == 5


def test_of_replicates_the_first_is_taken_and_of_other_instruments_none(tables) -> None:
    runs = tables["peaks"].assign(replicate=1)
    first = tables["peaks"].assign(replicate=0)
    other = tables["peaks"].assign(instrument="capacity")
    chosen = choose_runs(first.merge(runs, how="outer").merge(other, how="outer"))

    assert len(chosen) == 5
    assert set(chosen["replicate"]) == {0}
    assert "capacity" not in set(chosen["instrument"])


def test_the_memory_of_a_target_is_told_where_it_has_one(tables) -> None:
    memory = tables["peaks"].set_index("experiment_id")["target_memory_bytes"]

    assert memory[ON_H200.id] == H200.memory_bytes
    assert memory[ON_SMALL.id] == 2**30
    assert memory[[GHOST.id, HOOKS.id, ON_CPU.id]].isna().all()


def test_no_recorded_memory_makes_no_rows(tables) -> None:
    assert compose_peaks({stem: table.head(0) for stem, table in tables.items()}).empty
