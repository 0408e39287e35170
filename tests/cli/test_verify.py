"""``dpprof verify`` on a Hugging Face model, as a user runs it."""

import json

import pytest
from scripts import run

from dpprof.cli.options import make_experiment
from dpprof.cli.verify import main
from dpprof.planning.stand_ins import StandIn
from dpprof.spec.fine_tuning import Padding


def test_a_model_and_the_file_that_stands_for_it_are_one_subject(tmp_path) -> None:
    pytest.importorskip("transformers")
    given = {"model": "hf:tiny-llama", "method": "standard", "padding": "0.3"}
    sizes = {"batch_size": "1", "seq_len": "1", "device": "cpu"}
    stand_in = StandIn.of(make_experiment(given | sizes))
    file = tmp_path / f"{stand_in.label}.json"
    file.write_text(stand_in.canonical)
    options = [f"--{name}={value}" for name, value in given.items()]
    named = run("verify.py", *options, cwd=tmp_path)
    options = ["--stand-in", file.name, "--method=standard", "--output=y.json"]
    read = run("verify.py", *options, cwd=tmp_path)

    assert (named.returncode, read.returncode) == (0, 0), named.stderr + read.stderr
    usual = tmp_path / "results" / "verify" / f"{stand_in.label}-standard.json"
    verdicts = [json.loads(path.read_text()) for path in (usual, tmp_path / "y.json")]
    for verdict in verdicts:
        assert verdict["model"] == stand_in.label
        assert verdict["passed"] is True, verdict["reason"]
    assert verdicts[0]["cases"] == verdicts[1]["cases"]
    assert f"standard on {stand_in.label}: verified" in named.stderr


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--model=tiny", "--lora=rank=8"], "--lora: only for hf:NAME, a Hugging Face model"),
        (["--model=hf:tiny-llama", "--lora=rank=0"], "--lora.rank: '0' is not allowed; it must be"),
        (["--model=hf:tiny-lama"], "--model: 'hf:tiny-lama' is not allowed; after hf: comes"),
        (["--model=hf:tiny-llama", "--padding=2"], "--padding.fraction: '2' is not allowed"),
        (["--model=tinny"], "--model: 'tinny' is not allowed; did you mean 'tiny'"),
        (["--stand-in=no.json"], "[Errno 2] No such file or directory: 'no.json'"),
    ],
)
def test_bad_input_is_one_sentence(options, said: str, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main([*options, "--method=standard"])

    assert ended.value.code == 1
    told = capsys.readouterr().err
    assert told.startswith(f"error: {said}")
    assert told.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_an_edited_stand_in_is_refused(tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    given = {"model": "hf:tiny-gpt2", "method": "flash-bk", "batch_size": "1", "seq_len": "1"}
    stand_in = StandIn.of(make_experiment(given | {"device": "cpu"}))
    file = tmp_path / f"{stand_in.label}.json"
    edited = stand_in.model_copy(update={"padding": Padding(fraction=0.1)})
    file.write_text(edited.canonical)
    with pytest.raises(SystemExit):
        main([f"--stand-in={file}", "--method=flash-bk"])

    assert "was edited: its content belongs to hf-gpt2" in capsys.readouterr().err
