"""``dpprof verify`` on a Hugging Face model, as a user runs it."""

import json
from pathlib import Path

import pytest
from factory import write_synthetic_verdict
from fresh_process import run_captured
from scripts import call, spell

from dpprof.ask import verify
from dpprof.ask.questions import make_experiment
from dpprof.experiments.config.fine_tuning import Padding
from dpprof.experiments.planning.stand_ins import StandIn


def test_a_model_and_the_file_that_stands_for_it_are_one_subject(tmp_path, monkeypatch) -> None:
    given = {"model": "hf:tiny-llama", "method": "standard", "padding": "0.3"}
    experiment = make_experiment(given | {"batch_size": "1", "seq_len": "1", "device": "cpu"})
    stand_in = StandIn.of(experiment)
    file = tmp_path / f"{stand_in.label}.json"
    file.write_text(stand_in.canonical)
    verdict, asked = write_synthetic_verdict(tmp_path, experiment), []
    monkeypatch.setattr(verify, "verify_apart", lambda *what: asked.append(what) or verdict)
    options = [f"--{name}={value}" for name, value in given.items()]
    named = call("verify", *options, cwd=tmp_path)
    options = ["--stand-in", file.name, "--method=standard", "--output=y.json"]
    read = call("verify", *options, cwd=tmp_path)

    assert (named.returncode, read.returncode) == (0, 0), named.stderr + read.stderr
    usual = Path("results", "verify", f"{stand_in.label}-standard.json")
    assert asked == [(stand_in, "standard", usual), (stand_in, "standard", Path("y.json"))]
    assert f"standard on {stand_in.label}: verified" in named.stderr


@pytest.mark.slow
def test_a_hugging_face_model_is_verified_on_a_small_one(tmp_path) -> None:
    pytest.importorskip("transformers")
    options = ["--model=hf:tiny-llama", "--padding=0.3", "--method=standard", "--output=y.json"]
    done = run_captured(spell("verify", *options), tmp_path)
    verdict = json.loads((tmp_path / "y.json").read_text())

    assert verdict["passed"] is True, verdict["reason"]
    assert f"standard on {verdict['model']}: verified" in done.stderr


def test_an_edited_stand_in_is_refused(tmp_path) -> None:
    given = {"model": "hf:tiny-gpt2", "method": "flash-bk", "batch_size": "1", "seq_len": "1"}
    stand_in = StandIn.of(make_experiment(given | {"device": "cpu"}))
    file = tmp_path / f"{stand_in.label}.json"
    edited = stand_in.model_copy(update={"padding": Padding(fraction=0.1)})
    file.write_text(edited.canonical)
    done = call("verify", f"--stand-in={file}", "--method=flash-bk", cwd=tmp_path)

    assert "was edited: its content belongs to hf-gpt2" in done.stderr
