"""Whatever a method does to the process that verifies it, there is one whole file."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from children import HERE, refuse
from scripts import call

from dpprof.experiments.launch import verification_run
from dpprof.experiments.launch.device_lock import hold_one
from dpprof.experiments.records.record import read_record
from dpprof.experiments.records.verdict import Verdict, judged, read_verdict, verdict_path

pytestmark = pytest.mark.usefixtures("plugin")


def verify(folder: Path, method: str, *, model: str = "test-linear"):
    output = verdict_path(Path(), model, method)
    options = [f"--model={model}", f"--method={method}", f"--output={output}"]
    return call("verify", *options, cwd=folder)


def test_a_verdict_is_left_and_told(tmp_path) -> None:
    done = verify(tmp_path, "opacus-ghost")
    verdict = read_verdict(tmp_path, "test-linear", "opacus-ghost")

    assert done.returncode == 0, done.stderr
    assert "dpprof: opacus-ghost on test-linear: verified, largest relative error" in done.stderr
    assert "; holes: a layer thawed after set-up: the gradient is not the ref" in done.stderr
    assert (verdict.passed, verdict.references) == (True, ["microbatch", "torch.func"])
    errors = [one.max_relative_error for one in judged(verdict.cases)]
    assert verdict.max_relative_error == max(errors)
    assert verdict.mechanism == "flat clipping"
    assert verdict.holes == [
        "a layer thawed after set-up: the gradient is not the reference's",
        "one non-finite sample: the gradient is not finite",
    ]
    assert set(verdict.provenance) == {"git", "python", "packages"}


def test_a_method_that_dies_leaves_a_verdict_on_the_model_of_every_size(
    tmp_path,
) -> None:
    done = verify(tmp_path, "test-dies", model="1b")
    (path,) = (tmp_path / "results" / "verify").iterdir()
    verdict = read_record(path, Verdict)

    assert done.returncode == 0, done.stderr
    assert verdict.model == "built-in"
    assert (verdict.passed, verdict.cases) == (None, [])
    assert (verdict.mechanism, verdict.holes) == (None, [])
    assert "ended with signal 9" in verdict.reason


def test_a_method_that_hangs_is_ended(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(verification_run, "VERIFICATION_TIMEOUT_S", 1)
    monkeypatch.setattr(verification_run, "_VERIFY", "children:hang")
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    verdict = verification_run.verify_apart("built-in", "standard", tmp_path / "x.json")

    assert verdict.passed is None
    assert verdict.reason == "the verification took longer than 1 s"


def test_it_runs_beside_a_prediction_and_waits_for_a_measurement(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(verification_run, "_VERIFY", "children:fail")
    monkeypatch.setenv("PYTHONPATH", str(HERE))
    with hold_one([["cpu"]], refuse, shared=True):
        verification_run.verify_apart("built-in", "standard", tmp_path / "beside.json")
    assert (tmp_path / "beside.json").exists()
    with ThreadPoolExecutor() as pool:
        with hold_one([["cpu"]], refuse):
            waits = pool.submit(
                verification_run.verify_apart, "built-in", "standard", tmp_path / "after.json"
            )
            time.sleep(0.5)
            assert not (tmp_path / "after.json").exists()
        assert waits.result(timeout=60).cases == []
