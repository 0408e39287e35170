"""The command lines, run as a user runs them."""

import json
import re
import subprocess

import pytest
from factory import (
    make_experiment,
    write_manifest,
    write_runs,
    write_synthetic,
    write_synthetic_verdict,
)
from fresh_process import run_captured
from scripts import call, spell

from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.planning.code_digest import code_digest, verdict_digest
from dpprof.experiments.records.result import read_result
from dpprof.results.analysis.tables.columns import TABLES
from dpprof.results.analysis.tables.frames import write_sums

ONCE = {"model": "tiny", "method": "standard", "batch_size": "1", "seq_len": "4"}


def test_a_spec_and_the_options_that_it_stands_for_are_the_same_experiment(tmp_path) -> None:
    experiment = make_experiment(device="cpu", dtype="tf32")
    spec = tmp_path / f"{experiment.id}.json"
    spec.write_text(experiment.canonical)
    options = ["--spec", str(spec), "--output", "y.json", "--log", "logs/y.log"]
    done = call("profile", *options, cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / "y.json").read_text())
    assert (document["experiment_id"], document["outcome"]) == (experiment.id, "unsupported")
    assert document["error"]["log"] == "logs/y.log"
    assert (tmp_path / "logs" / "y.log").read_text().endswith("attempt 1: unsupported\n")


def test_forget_outdated_forgets_what_other_code_measured_and_nothing_else(tmp_path) -> None:
    current, other = make_experiment(), make_experiment(batch_size=3)
    write_synthetic_verdict(
        tmp_path, current, code_digest=verdict_digest("built-in", current.method)
    )
    write_synthetic_verdict(tmp_path, make_experiment(method="microbatch"))
    write_synthetic(tmp_path, current, code_digest=code_digest("clean", current))
    write_synthetic(tmp_path, other)
    done = call("forget", "--outdated", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert [p.name for p in (tmp_path / "results/verify").iterdir()] == ["built-in-standard.json"]
    assert [p.name for p in (tmp_path / "results/clean").iterdir()] == [f"{current.id}.r0.json"]


def test_what_names_a_method_that_is_not_installed_is_told_and_stays(tmp_path) -> None:
    write_synthetic(tmp_path, make_experiment(method="nobody-has-it"))
    before = sorted(tmp_path.rglob("*.json"))
    done = call("forget", "--outdated", cwd=tmp_path)

    assert done.returncode == 1
    for path, line in zip(before, done.stderr.splitlines(), strict=False):
        told = f"warning: {path.relative_to(tmp_path)}: stays; methods: 'nobody-has-it' is not"
        assert line.startswith(told)
    assert sorted(tmp_path.rglob("*.json")) == before


def test_forget_unverified_forgets_verdicts_that_did_not_pass_and_no_result(tmp_path) -> None:
    for method, passed in {"standard": True, "microbatch": False, "opacus-ew": None}.items():
        experiment = make_experiment(method=method)
        write_synthetic_verdict(tmp_path, experiment, passed, reason="x")
        write_synthetic(tmp_path, experiment)
    done = call("forget", "--unverified", cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    assert "built-in-microbatch.json  failed verification" in done.stdout
    assert [p.name for p in (tmp_path / "results/verify").iterdir()] == ["built-in-standard.json"]
    assert len(list((tmp_path / "results/clean").iterdir())) == 3


def test_a_full_log_disk_and_a_closed_terminal_cost_no_result(tmp_path) -> None:
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in ONCE.items()]
    options = [*arguments, "--dtype=tf32", "--output=x.json", "--log=/dev/full"]
    command = spell("profile", *options)
    process = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE)
    process.stderr.close()

    assert process.wait(timeout=120) == 0
    assert read_result(tmp_path / "x.json").outcome == "unsupported"


def test_a_full_disk_is_a_sentence_and_keeps_what_was_there(tmp_path) -> None:
    experiment = make_experiment()
    manifest = write_manifest(tmp_path, write_runs(tmp_path, (experiment, "clean", {})))
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.json")}
    options = [f"--manifest={manifest}", "--output-dir=results/tables"]
    limited = ["bash", "-c", 'ulimit -f 1; "$@"', "bash", *spell("tables", *options)]
    done = run_captured(limited, tmp_path)

    assert done.returncode == 1
    assert re.fullmatch(r"error: \[Errno 27\] File too large: '\S*\.csv'\n", done.stderr)
    assert all(len(path.read_bytes()) <= 1024 for path in tmp_path.rglob("*.csv"))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.json")} == before
    assert list(tmp_path.rglob(".*")) == []


def test_every_field_of_an_experiment_is_an_option_with_help(tmp_path) -> None:
    text = call("profile", "--help", cwd=tmp_path).stdout

    for name in Experiment.model_fields:
        assert f"--{name.replace('_', '-')} VALUE" in text


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"sweeps: \xff", "is not UTF-8 text, see byte 9"),
        (b"a: " + b"[" * 100_000, "nests deeper than 50 levels"),
        (b"sweeps: {}\nsweeps: {}\n", "the key 'sweeps' occurs twice"),
        (b"sweeps: {}\n", "sweeps: {} is not allowed; it must have at least 1 item"),
    ],
    ids=["binary", "deep", "twice", "empty"],
)
def test_prune_deletes_nothing_for_a_config_that_cannot_be_meant(
    tmp_path, content: bytes, problem: str
) -> None:
    (tmp_path / "my.yaml").write_bytes(content)
    write_synthetic(tmp_path, make_experiment())
    before = sorted(tmp_path.rglob("*"))
    done = call("prune", "--delete", "my.yaml", cwd=tmp_path)

    assert done.returncode == 1
    assert done.stderr.startswith(f"error: my.yaml: {problem}")
    assert len(done.stderr.splitlines()) == 1
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("command", "options"),
    [("report", ["--output-dir=r"]), ("figure", ["--figure=tradeoff", "--output=x.png"])],
)
def test_a_table_that_is_none_is_named(tmp_path, command: str, options) -> None:
    (tmp_path / "t").mkdir()
    for name in TABLES:
        (tmp_path / "t" / f"{name}.csv").write_bytes(b"\xff\xfe")
    write_sums(tmp_path / "t", [f"{name}.csv" for name in TABLES])
    done = call(command, "--tables=t", *options, cwd=tmp_path)

    assert done.returncode == 1
    assert done.stderr.startswith("error: t/")
    assert ".csv: is not a table (" in done.stderr
