"""What fits on a GPU, from Python and on the command line."""

import json
import runpy
from types import SimpleNamespace

import pytest
from factory import make_experiment as make_small
from fresh_process import ROOT
from snapshots import assert_sentences

import dpprof
from dpprof.ask import fits as module
from dpprof.ask.commands.main import main
from dpprof.ask.fits import Cell, Fits, spell_pattern, tell_need
from dpprof.ask.layout import LINES, WIDTH
from dpprof.ask.questions import make_experiment
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
    t4, l4 = (
        make_experiment(module._ask(name, "hf:tiny-llama", "LoRA", 64), for_question=True)
        for name in ("t4", "l4")
    )

    assert (t4.dtype, t4.parameters_dtype, t4.loss_scale) == ("float16", "float16", 65536)
    assert (l4.dtype, l4.parameters_dtype, l4.loss_scale) == ("bfloat16", "bfloat16", 1)
    assert t4.optimizer == l4.optimizer == "adamw-fused"


def test_what_one_sample_needs_is_read_from_the_sentence_that_refuses_it() -> None:
    batches = SimpleNamespace(peaks={1: 31_000 * 2**20}, budget=14 * 2**20, least=1)
    refused = _explain(make_small(), batches, 0)

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
    assert told.startswith("1 of 1 fit on l4 with flash-bk (bfloat16, adamw-8bit, eager).")
    pattern, _ = spell_pattern("l4", ["whole"])
    assert f"To ask for one: {pattern}" in told.replace("\n  non", " non")
    assert "dpprof advise --model hf:tiny-llama --target l4 --seq-len 64" in cell["command"]
    again = dpprof.fits("l4", **SMALL)
    assert again.cells[0].batch_size == cell["batch_size"]
    assert len([*(folder / "results" / "capacity").glob("*.json")]) == 1  # kept, and used


SCRIPT = runpy.run_path(str(ROOT / "workflow" / "scripts" / "what_fits.py"))


def make_cell(model: str, way: str, seq_len: int, batch: int | None = 8, **others) -> Cell:
    numbers = {"peak_bytes": 2**30, "tokens_per_s": 100.0, "hours": 12.34, "price": None}
    told = {"target": "l4", "batch_size": batch, "message": None, "command": "dpprof advise"}
    return Cell(**{"model": model, "way": way, "seq_len": seq_len} | numbers | told | others)


def test_ways_and_lengths_stand_side_by_side_where_there_are_few() -> None:
    need = {"batch": None, "message": "hf-b with flash-bk needs 31,000 MiB for one sample of 64"}
    cells = [
        make_cell("hf:a", "whole", 64, 1234),
        make_cell("hf:a", "LoRA", 64, None, message="2, with nothing to spare"),
        make_cell("hf:b", "whole", 64, **need),
        make_cell("hf:b", "LoRA", 64, price=5.678),
    ]
    lines = str(Fits(cells[:3], 1e6)).splitlines()

    assert lines[0].startswith("1 of 3 fit on l4 with flash-bk (bfloat16, adamw-8bit or adamw-fu")
    assert [line.split() for line in lines[2:5]] == [
        ["model", "whole", "64", "LoRA", "64"],
        2 * ["batch", "hours"],
        ["a", "1,234", "12.3", "none"],
    ]
    assert lines[5].split() == ["b", "30", "GiB"]
    assert lines[6] == "none: 2, with nothing to spare"
    priced = str(Fits(cells[2:], 1e6)).splitlines()
    assert priced[4].split() == ["b", "30", "GiB", "8", "12.3", "5.68"]


def test_what_fits_on_each_gpu_fits_a_screen_however_much_is_asked() -> None:
    cells = [
        make_cell(f"hf:model-{n}", way, seq_len, target=target)
        for target in ("l4", "t4")
        for n in range(30)
        for way in module.WAYS
        for seq_len in (512, 1024, 2048)
    ]
    answer = Fits(cells, 1e6)

    for part in str(answer).split("\n\n"):
        lines = part.splitlines()
        assert len(lines) == LINES
        assert max(map(len, lines)) <= WIDTH
        assert any(line.endswith(" more: --details") for line in lines)
    assert answer.details.count("dpprof advise") == len(cells)


def test_the_page_has_a_section_of_each_gpu_with_the_pattern_of_a_command() -> None:
    page = SCRIPT["PAGE"].read_text(encoding="utf-8")

    for target, price in SCRIPT["PRICES"].items():
        assert f"\ndpprof fits --target {target} --price-per-hour {price:g}\n" in page
        pattern, *options = spell_pattern(target, module.WAYS)
        section = page.partition(f"\n## {target}\n")[2].partition("\n## ")[0]
        assert f"\nA row by itself is `{pattern}` with\n" in section
        for text in options:
            way, words = text.split(": ", 1)
            assert f"\n* {way}: `{words}`\n" in section + "\n"


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
