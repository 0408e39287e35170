import math

import pandas as pd
import pytest
from factory import make_experiment, make_manifest, tables_of_runs, write_synthetic

from dpprof.experiments.config.validation import InputError
from dpprof.experiments.planning.artifacts import code_path
from dpprof.results.analysis.collection import collect
from dpprof.results.analysis.statistics import NO_DIFFERENCE
from dpprof.results.analysis.tables.build import build_tables
from dpprof.results.analysis.tables.columns import TABLES

STANDARD = make_experiment(method="standard")
GHOST = make_experiment(method="opacus-ghost")
OTHER_BATCH = make_experiment(method="opacus-ghost", batch_size=3)


def many(experiment, seconds, **fields):
    """Return clean replicates, one for each step time."""
    return [
        (experiment, "clean", {"replicate": number, "step_s": (step_s,)} | fields)
        for number, step_s in enumerate(seconds)
    ]


@pytest.fixture
def tables(tmp_path):
    """Standard takes 1 s and 1 MiB; ghost 2, 4 and 3 s and 3 MiB; a ghost batch of 3 fails."""
    return tables_of_runs(
        tmp_path,
        (STANDARD, "clean", {"step_s": (1.0, 1.0, 7.0)}),
        *many(GHOST, [2.0, 4.0, 3.0], peak_rss_bytes=3 * 2**20),
        (OTHER_BATCH, "clean", {"outcome": "oom", "message": "no room"}),
    )


def row_of(table, experiment, **others):
    found = table[table["experiment_id"] == experiment.id]
    for name, value in others.items():
        found = found[found[name] == value]
    assert len(found) == 1
    return found.iloc[0]


def test_medians_are_taken_over_processes(tables) -> None:
    ghost = row_of(tables["experiments"], GHOST)

    # Of three processes, the bootstrap's interval is their range.
    assert (ghost["median_step_s"], ghost["step_low_s"], ghost["step_high_s"]) == (3.0, 2.0, 4.0)
    assert (ghost["runs"], ghost["runs_ok"], ghost["processes"]) == (3, 3, 3)
    assert ghost["tokens_per_s"] == pytest.approx(2 * 4 / 3.0)


def test_ratios_are_to_standard_with_all_else_equal(tables) -> None:
    ghost = row_of(tables["experiments"], GHOST)
    failed = row_of(tables["experiments"], OTHER_BATCH)

    assert (ghost["step_ratio"], ghost["peak_ratio"]) == (3.0, 3.0)
    assert row_of(tables["experiments"], STANDARD)["step_ratio"] == 1.0
    assert math.isnan(failed["step_ratio"])


def experiments_of(root, *runs):
    return tables_of_runs(root, *runs)["experiments"]


def test_noise_and_clipping_do_not_change_the_baseline(tmp_path) -> None:
    noisy = make_experiment(method="opacus-ghost", noise_multiplier=0.5, max_grad_norm=2)
    table = experiments_of(tmp_path, *many(STANDARD, [1.0]), *many(noisy, [5.0]))

    assert row_of(table, noisy)["step_ratio"] == 5.0


def test_several_baselines_count_as_one_and_a_failed_one_does_not_count(tmp_path) -> None:
    """The noise of a non-private step means nothing, so these three are one baseline."""
    quick, slow, failed = (
        make_experiment(method="standard", noise_multiplier=noise) for noise in (1, 2, 3)
    )
    runs = [*many(quick, [1.0]), *many(slow, [3.0]), (failed, "clean", {"outcome": "oom"})]
    table = experiments_of(tmp_path, *runs, *many(GHOST, [5.0]))

    assert row_of(table, GHOST)["step_ratio"] == 5.0 / 2.0
    assert row_of(table, slow)["step_ratio"] == 3.0 / 2.0


@pytest.mark.parametrize(
    ("standard", "ghost", "ratio", "verdict"),
    [
        ([1.0, 1.1, 0.9], [1.05, 0.95, 1.15], 1.05, NO_DIFFERENCE),
        ([1.0, 1.01, 0.99], [2.0, 2.02, 1.98], 2.0, "larger"),
    ],
)
def test_a_ratio_counts_beyond_the_noise_alone(tmp_path, standard, ghost, ratio, verdict) -> None:
    row = row_of(experiments_of(tmp_path, *many(STANDARD, standard), *many(GHOST, ghost)), GHOST)

    assert (row["step_ratio"], row["step_verdict"]) == (pytest.approx(ratio), verdict)
    assert (row["step_floor"] > 0.05) == (verdict == NO_DIFFERENCE)
    assert (row["step_ratio_low"] < 1 < row["step_ratio_high"]) == (verdict == NO_DIFFERENCE)


def test_noise_of_replicated_neighbours_serves_those_measured_once(tmp_path) -> None:
    """Another batch size of the same model was replicated, and is about as noisy."""
    runs = many(make_experiment(batch_size=7), [1.0, 1.2, 0.8])
    ghost = row_of(
        experiments_of(tmp_path, *runs, *many(STANDARD, [1.0]), *many(GHOST, [1.1])), GHOST
    )

    assert ghost["step_verdict"] == NO_DIFFERENCE
    assert math.isnan(ghost["step_p_value"])


def test_without_any_replicate_nothing_is_said_about_a_difference(tmp_path) -> None:
    ghost = row_of(experiments_of(tmp_path, *many(STANDARD, [1.0]), *many(GHOST, [9.0])), GHOST)

    assert ghost["step_ratio"] == 9.0
    assert pd.isna(ghost["step_verdict"])
    assert pd.isna(ghost["step_floor"])


def test_time_comes_from_clean_and_the_cpus_peak_from_phases(tmp_path) -> None:
    watched = {"step_s": (7.0,), "peak_rss_bytes": None, "peak_allocated_bytes": 100}
    phases = [(GHOST, "phases", watched | {"replicate": number}) for number in range(2)]
    ghost = row_of(
        experiments_of(tmp_path, *many(GHOST, [1.0], peak_rss_bytes=500), *phases), GHOST
    )

    assert (ghost["median_step_s"], ghost["processes"], ghost["runs"]) == (1.0, 1, 3)
    peak = ghost[["peak_kind", "peak_bytes", "peak_processes"]].tolist()
    assert peak == ["allocated", 100, 2]


def test_phases_components_and_samplers_are_rows(tmp_path) -> None:
    fields = {"phases_s": {"forward": [1.0, 5.0, 2.0], "step": [1.0, 1.0, 1.0]}}
    fields |= {"components": {"parameters": 40, "unattributed": 2}}
    fields |= {"samplers": {"Linear": "norm sampler"}}
    tables = tables_of_runs(tmp_path, (GHOST, "phases", fields))

    forward = row_of(tables["phases"], GHOST, phase="forward")
    assert (forward["median_s"], forward["min_s"], forward["max_s"]) == (2.0, 1.0, 5.0)
    parameters = row_of(tables["components"], GHOST, component="parameters")
    assert (parameters["snapshot"], parameters["bytes"]) == ("after_backward", 40)
    assert row_of(tables["samplers"], GHOST, layer="Linear")["path"] == "norm sampler"


def test_reserved_and_resident_memory_keep_their_spread(tmp_path) -> None:
    names = ("peak_allocated_bytes", "peak_reserved_bytes", "peak_rss_bytes")
    sizes = [(60, 80, 500), (60, 100, 400)]
    runs = [
        (GHOST, "clean", {"replicate": number} | dict(zip(names, one, strict=True)))
        for number, one in enumerate(sizes)
    ]
    tables = tables_of_runs(tmp_path, *runs)
    ghost = row_of(tables["experiments"], GHOST)

    assert (ghost["reserved_min_bytes"], ghost["reserved_max_bytes"]) == (80, 100)
    assert (ghost["rss_min_bytes"], ghost["rss_max_bytes"]) == (400, 500)
    assert (ghost["peak_min_bytes"], ghost["peak_max_bytes"]) == (60, 60)
    assert tables["runs"]["fragmentation"].tolist() == pytest.approx([0.25, 0.4])


def test_outcomes_and_success_rate_per_method(tables) -> None:
    outcomes = tables["outcomes"].set_index("method")

    assert outcomes.loc["opacus-ghost", ["runs", "ok", "oom", "crashed"]].tolist() == [4, 3, 1, 0]
    assert outcomes.loc["opacus-ghost", "success_rate"] == 0.75
    assert outcomes.loc["standard", "success_rate"] == 1.0


def test_steps_keep_raw_samples_with_warm_up_apart(tables) -> None:
    steps = tables["steps"][tables["steps"]["experiment_id"] == STANDARD.id]

    assert steps[steps["stage"] == "timed"]["step_s"].tolist() == [1.0, 1.0, 7.0]
    assert steps[steps["stage"] == "warmup"]["step_s"].tolist() == [9.0]


def test_a_missing_result_is_an_error_that_names_it(tmp_path) -> None:
    with pytest.raises(InputError, match=rf"{STANDARD.id}\.r0\.json: is missing.*partial=true"):
        collect(make_manifest((STANDARD, 0)), tmp_path, partial=False)


def test_partial_lists_what_is_missing(tmp_path) -> None:
    write_synthetic(tmp_path, STANDARD)
    collected = collect(make_manifest((STANDARD, 0), (GHOST, 0)), tmp_path, partial=True)
    tables = build_tables(collected)

    assert tables["missing"]["experiment_id"].tolist() == [GHOST.id]
    outcomes = tables["outcomes"].set_index("method")
    assert outcomes.loc["opacus-ghost", ["runs", "missing"]].tolist() == [0, 1]
    assert math.isnan(outcomes.loc["opacus-ghost", "success_rate"])


def test_results_of_older_code_are_marked(tmp_path) -> None:
    for method, digest in (("standard", "a" * 64), ("opacus-ghost", "b" * 64)):
        path = tmp_path / code_path(f"clean-{method}")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(digest + "\n")
    measured = {"code_digest": "a" * 64}
    runs = tables_of_runs(tmp_path, (STANDARD, "clean", measured), (GHOST, "clean", measured))
    runs = runs["runs"]

    assert row_of(runs, STANDARD)["code_is_current"]
    assert not row_of(runs, GHOST)["code_is_current"]


def test_what_a_result_does_not_say_of_its_machine_is_unknown(tmp_path) -> None:
    provenance = {"host": {}, "python": None, "packages": {}, "git": {}}
    fields = {"others_busy_cores": 2.0, "device": {}, "provenance": provenance}
    tables = tables_of_runs(tmp_path, (make_experiment(), "clean", fields))

    unknown = ["device_name", "hostname", "python", "torch", "opacus", "git_commit", "git_dirty"]
    assert tables["runs"].loc[0, unknown].isna().all()


def test_the_tables_are_those_that_are_declared(tables) -> None:
    assert set(tables) == set(TABLES)
    for name, table in tables.items():
        assert list(table.columns) == list(TABLES[name].columns)
        assert [c.name for c in TABLES[name].columns.values() if not c.description] == []
