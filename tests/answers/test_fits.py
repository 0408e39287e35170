"""What fits on a GPU, from Python and on the command line."""

import json
import runpy
from types import SimpleNamespace

import pytest
from factory import make_experiment
from fresh_process import ROOT
from snapshots import assert_sentences

import dpprof
from dpprof.ask import fits as module
from dpprof.ask.commands.main import main
from dpprof.ask.fits import tell_need
from dpprof.experiments.config.validation import InputError
from dpprof.predict.capacity import _explain

SMALL = {"models": ["hf:tiny-llama"], "ways": ["whole"], "seq_lens": [64]}


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal_of(keywords) -> str:
    with pytest.raises(InputError) as refusal:
        dpprof.fits(**{"target": "l4", **SMALL, **keywords})
    return str(refusal.value)


def test_what_is_not_allowed_is_refused_in_a_sentence() -> None:
    assert_sentences("answers/fits", refusal_of)


def test_a_card_without_units_for_bfloat16_is_asked_in_float16_with_a_scale() -> None:
    asked = {name: module._ask(name, "hf:tiny-llama", "LoRA", 64) for name in ("t4", "l4")}

    assert (asked["t4"]["dtype"], asked["t4"]["loss_scale"]) == ("float16", 65536)
    assert asked["t4"]["parameters_dtype"] == "float16"
    assert asked["l4"]["dtype"] == asked["l4"]["parameters_dtype"] == "bfloat16"
    assert "loss_scale" not in asked["l4"]


def test_what_one_sample_needs_is_read_from_the_sentence_that_refuses_it() -> None:
    batches = SimpleNamespace(peaks={1: 31_000 * 2**20}, budget=14 * 2**20, least=1)
    refused = _explain(make_experiment(), batches, 0)

    assert tell_need(refused) == "needs 31,000 MiB"
    assert tell_need("no such layer") == "no such layer"


@pytest.mark.slow
def test_the_command_tells_batch_hours_and_price_and_how_to_ask_again(folder, capsys) -> None:
    options = ["--models", "hf:tiny-llama", "--ways", "whole", "--seq-lens", "64"]
    options += ["--tokens", "36e6", "--price-per-hour", "2", "--json", "fits.json"]
    with pytest.raises(SystemExit) as ended:
        main(["fits", "--target", "l4", *options])
    assert ended.value.code == 0
    [cell] = json.loads((folder / "fits.json").read_text())["cells"]
    told = capsys.readouterr().out

    assert cell["hours"] == pytest.approx(1e4 / cell["tokens_per_s"])
    assert cell["price"] == pytest.approx(2 * cell["hours"])
    assert cell["command"] in told
    assert "dpprof advise --model hf:tiny-llama --target l4 --seq-len 64" in cell["command"]
    again = dpprof.fits("l4", **SMALL)
    assert again.cells[0].batch_size == cell["batch_size"]
    assert len([*(folder / "results" / "capacity").glob("*.json")]) == 1  # kept, and used


SCRIPT = runpy.run_path(str(ROOT / "workflow" / "scripts" / "what_fits.py"))


def test_the_page_has_a_section_of_each_gpu_with_a_command_for_every_row() -> None:
    page = SCRIPT["PAGE"].read_text(encoding="utf-8")
    asked = [row for row in page.splitlines() if row.startswith("* `dpprof advise --model")]
    each = len(module.MODELS) * len(module.WAYS) * len(module.SEQ_LENS)

    for target, price in SCRIPT["PRICES"].items():
        assert f"\ndpprof fits --target {target} --price-per-hour {price:g}\n" in page
        assert sum(f"--target {target} " in row for row in asked) == each


@pytest.mark.slow
def test_the_page_shows_what_is_predicted_today() -> None:
    page = SCRIPT["PAGE"].read_text(encoding="utf-8")
    found = {
        target: dpprof.fits(target, price_per_hour=price).cells
        for target, price in SCRIPT["PRICES"].items()
    }
    sections = [
        SCRIPT["render"](name, SCRIPT["PRICES"][name], cells) for name, cells in found.items()
    ]

    assert SCRIPT["write"](sections) == page
