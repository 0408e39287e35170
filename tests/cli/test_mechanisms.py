"""Mechanisms from the command line: what is printed, written, drawn and refused."""

import csv
import importlib
import json

import pytest
from documents import validate
from factory import make_capacity
from scripts import HERE, MODEL, call
from snapshots import assert_sentences, refusals_of

import dpprof
from dpprof.experiments.launch import accounting_run

ASKED = ["--model", MODEL, "--seq-len", "8", "--methods", "flash-bk"]
SPENT = ["--samples=1e4", "--tokens=4e5", "--epsilon=8", "--accountant=rdp", "--batch-size=512"]


@pytest.fixture(autouse=True)
def accounting_here(monkeypatch):
    """Ask the accountants in this process."""

    def account(answer, function, code, privacy, *question):
        module, _, name = function.partition(":")
        ask = getattr(importlib.import_module(module), name)
        return ask(privacy.model_dump_json(), *question)

    monkeypatch.setattr(accounting_run, "_ask_apart", account)


@pytest.fixture
def found(tmp_path, keep_capacities):
    for bands, step_s in {1: 1.0, 4: 1.2, 8: 1.4}.items():
        strategy = [] if bands == 1 else [f"--noise-strategy=banded-{bands}"]
        sizes = {"budget_bytes": 25 * 2**20, "unfragmented_batch_size": 12, "safe_share": None}
        capacity = make_capacity(step_s, **sizes)
        keep_capacities(tmp_path, [*ASKED, *HERE, *strategy], lambda _, told=capacity: told)
    return tmp_path


def test_mechanisms_are_printed_and_written(found) -> None:
    names = ["banded-8", "banded-4", "bisr-4", "banded-20"]
    options = ["--mechanism", *names, "--json=m.json", "--csv=m.csv"]
    done = call("budget", *ASKED, *HERE, *SPENT, *options, cwd=found)

    assert done.returncode == 0, done.stderr
    told = json.loads((found / "m.json").read_text())
    validate(told, "mechanisms")
    costs = {cost["mechanism"]: cost for cost in told["mechanisms"]}
    assert list(costs) == ["independent", *names]
    plain, banded = costs["independent"], costs["banded-8"]
    assert plain["noise_multiplier"] < costs["banded-4"]["noise_multiplier"]
    assert banded["sum_noise"] < plain["sum_noise"]
    assert banded["batch_size"] < plain["batch_size"] == 512
    assert banded["gpu_hours"] < plain["gpu_hours"]
    assert "20 folds of 500 samples are too few" in costs["banded-20"]["message"]
    rows = list(csv.DictReader((found / "m.csv").open()))
    assert [row["mechanism"] for row in rows] == list(costs)
    lines = done.stdout.splitlines()
    assert len(lines) <= 20
    assert max(map(len, lines)) <= 100
    assert lines[0].startswith(
        f"{min(rows, key=lambda r: float(r['gpu_hours'] or 9e9))['mechanism']}:"
    )


def test_from_python_hours_and_noise_are_drawn_over_bands(found, monkeypatch) -> None:
    monkeypatch.chdir(found)
    told = dpprof.budget(
        MODEL,
        methods=["flash-bk"],
        mechanism=["banded-4", "banded-8"],
        target="l4",
        memory_limit_bytes="25MiB",
        seq_len=8,
        samples=10_000,
        tokens=4e5,
        epsilon=8,
        accountant="rdp",
        batch_size=512,
    )
    noise, hours = told.plot().axes

    [line] = noise.lines
    assert list(line.get_xdata()) == [1, 4, 8]
    assert line.get_ydata()[0] == 1
    assert list(hours.lines[0].get_ydata()) == list(told.table()["gpu_hours"])


def test_what_is_refused() -> None:
    asked = {"target": "l4", "seq_len": 8, "samples": 10_000, "tokens": 4e5, "epsilon": 8}
    refuse = refusals_of(lambda **options: dpprof.budget(MODEL, **asked | options))
    assert_sentences("cli/mechanisms", refuse)
