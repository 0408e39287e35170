"""Verdicts in the tables: of experiments, of methods, and why not."""

import pytest
from factory import make_experiment, make_manifest, tables_of_runs, write_synthetic_verdict

from dpprof.experiments.planning.artifacts import code_path
from dpprof.experiments.records.verdict import verdict_path
from dpprof.results.analysis.collection import collect
from dpprof.results.analysis.standings import (
    methods_by_hole,
    name_other_mechanisms,
    name_unverified,
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
    assert name_unverified(tables["verification"]) == {"opacus-ghost": "it differs"}


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
    assert name_other_mechanisms(verification) == {"opacus-ghost": "adaptive flat clipping"}
    assert methods_by_hole(verification) == {
        "one: a": ["opacus-ghost"],
        "another: b": ["opacus-ghost"],
    }


def test_a_method_that_is_not_private_is_no_other_mechanism(tmp_path) -> None:
    write_synthetic_verdict(tmp_path, GHOST, mechanism="none")
    table = tables_of(tmp_path, GHOST)["verification"]

    assert table["mechanism"].tolist() == ["none"]
    assert name_other_mechanisms(table) == {}
    assert methods_by_hole(table) == {}


def test_without_a_verdict_nothing_is_known(tmp_path) -> None:
    tables_of(tmp_path, GHOST)
    verdict_path(tmp_path, "built-in", "opacus-ghost").unlink()
    collected = collect(make_manifest((GHOST, 0)), tmp_path, partial=True)
    table = build_tables(collected)["verification"]

    assert table["verified"].tolist() == [None]
    assert name_unverified(table) == {"opacus-ghost": "it has no verdict yet"}


def test_a_verdict_on_other_code_says_nothing(tmp_path) -> None:
    path = tmp_path / code_path("verify-opacus-ghost")
    path.parent.mkdir(parents=True)
    path.write_text("a" * 64 + "\n")

    assert name_unverified(tables_of(tmp_path, GHOST)["verification"]) == {
        "opacus-ghost": "its verdict is about other code than the present"
    }


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
