"""Verdicts in the tables: of experiments, of methods, and why not."""

import pytest
from factory import make_experiment, make_manifest, tables_of_runs, write_synthetic_verdict

from dpprof.experiments.planning.artifacts import code_path
from dpprof.experiments.records.verdict import verdict_path
from dpprof.results.analysis.collection import collect
from dpprof.results.analysis.standings import (
    DAGGER,
    DOUBLE_DAGGER,
    find_marks,
    methods_by_hole,
    read_standings,
)
from dpprof.results.analysis.tables.build import build_tables

GHOST = make_experiment(method="opacus-ghost")
HOOKS = make_experiment(method="opacus-hooks")


def tables_of(root, *experiments):
    return tables_of_runs(root, *((experiment, "clean", {}) for experiment in experiments))


def test_experiments_and_methods_have_the_verdict_and_the_error(tmp_path) -> None:
    write_synthetic_verdict(tmp_path, GHOST, False, reason="it differs", max_relative_error=0.5)
    tables = tables_of(tmp_path, GHOST, HOOKS)

    for name in ("experiments", "methods"):
        verdicts = dict(zip(tables[name]["method"], tables[name]["verified"], strict=True))
        assert verdicts == {"opacus-ghost": False, "opacus-hooks": True}
        assert set(tables[name]["max_relative_error"]) == {0.5, 1e-16}
    assert find_marks(tables["verification"])[DAGGER] == {"opacus-ghost"}
    assert "it differs" in set(tables["verification"]["reason"])


PLAIN = "its verdict is about steps that are not compiled, with head logits"


@pytest.mark.parametrize(
    ("other", "passed", "verified", "reason"),
    [
        ({}, True, True, None),
        ({"execution": "compiled"}, True, None, PLAIN),
        ({"head": "chunked"}, True, None, PLAIN),
        ({"head": "chunked"}, False, False, "it differs"),
    ],
)
def test_a_failed_verdict_alone_holds_for_steps_that_run_in_another_way(
    other, passed, verified, reason, tmp_path
) -> None:
    said = {"reason": None if passed else "it differs", "mechanism": "adaptive flat clipping"}
    write_synthetic_verdict(tmp_path, GHOST, passed, **said)
    experiment = make_experiment(method="opacus-ghost", **other)
    [standing] = read_standings(tmp_path, [experiment], lambda *_: None).values()

    assert (standing.verified, standing.reason) == (verified, reason)
    assert standing.mechanism == "adaptive flat clipping"


def test_the_mechanism_is_in_every_table_that_compares_methods(tmp_path) -> None:
    told = {"mechanism": "adaptive flat clipping", "holes": ["one: a", "another: b"]}
    write_synthetic_verdict(tmp_path, GHOST, **told)
    tables = tables_of(tmp_path, GHOST, HOOKS, make_experiment(method="standard"))

    for name in ("verification", "experiments", "methods"):
        found = dict(zip(tables[name]["method"], tables[name]["mechanism"], strict=True))
        assert found["opacus-ghost"] == "adaptive flat clipping"
        assert found["opacus-hooks"] == "flat clipping"
    verification = tables["verification"]
    assert find_marks(verification)[DOUBLE_DAGGER] == {"opacus-ghost"}
    assert methods_by_hole(verification) == {
        "one: a": ["opacus-ghost"],
        "another: b": ["opacus-ghost"],
    }


def test_a_method_that_is_not_private_is_no_other_mechanism(tmp_path) -> None:
    write_synthetic_verdict(tmp_path, GHOST, mechanism="none")
    table = tables_of(tmp_path, GHOST)["verification"]

    assert table["mechanism"].tolist() == ["none"]
    assert find_marks(table)[DOUBLE_DAGGER] == set()
    assert methods_by_hole(table) == {}


def test_without_a_verdict_nothing_is_known(tmp_path) -> None:
    tables_of(tmp_path, GHOST)
    verdict_path(tmp_path, "built-in", "opacus-ghost").unlink()
    collected = collect(make_manifest((GHOST, 0)), tmp_path, partial=True)
    table = build_tables(collected)["verification"]

    assert table["verified"].tolist() == [None]
    assert table["reason"].tolist() == ["it has no verdict yet"]
    assert find_marks(table)[DAGGER] == {"opacus-ghost"}


def test_a_verdict_on_other_code_says_nothing(tmp_path) -> None:
    path = tmp_path / code_path("verify-opacus-ghost")
    path.parent.mkdir(parents=True)
    path.write_text("a" * 64 + "\n")

    table = tables_of(tmp_path, GHOST)["verification"]
    assert table["reason"].tolist() == ["its verdict is about other code than the present"]
    assert find_marks(table)[DAGGER] == {"opacus-ghost"}


def test_one_row_for_each_method_and_attention_whatever_the_size(tmp_path) -> None:
    experiments = [
        make_experiment(method="opacus-ghost", attention=attention, batch_size=batch)
        for attention in ("sdpa", "eager")
        for batch in (1, 2)
    ]
    table = tables_of(tmp_path, *experiments)["verification"]

    assert table[["model", "attention", "method"]].to_numpy().tolist() == [
        ["built-in", "eager", "opacus-ghost"],
        ["built-in", "sdpa", "opacus-ghost"],
    ]
