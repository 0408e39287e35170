"""The questions of the commands, asked from Python: the same answers, as objects."""

import doctest
import json
import math
import sys

import pytest
from fresh_process import run_fresh
from matplotlib.figure import Figure
from scripts import ASKED, HERE, MODEL, call
from snapshots import assert_sentences

import dpprof
from dpprof.experiments.accounting.noise import plan_noise
from dpprof.experiments.config.validation import InputError
from dpprof.experiments.launch import accounting_run
from dpprof.experiments.records.result import read_result, result_path

FIELDS = {"model": MODEL, "seq_len": 8, "target": "l4", "memory_limit_bytes": "25MiB"}
METHODS = ["standard", "flash-bk"]
SPENT = {"samples": 10_000, "tokens": 400_000, "epsilon": [8, 6], "delta": 1e-5}


def test_importing_dpprof_loads_no_library() -> None:
    heavy = '{"torch", "opacus", "numpy", "scipy", "pandas", "matplotlib", "pydantic"}'
    code = f"import sys, dpprof; print({heavy} & set(sys.modules))"
    assert run_fresh(code) == "set()"


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'dpprof' has no attribute 'estimates'"):
        _ = dpprof.estimates


@pytest.fixture
def here(asked, monkeypatch):
    """A folder with the capacities of two methods, and the text that ``dpprof advise`` printed."""
    monkeypatch.chdir(asked)
    account = lambda privacy, lengths: [plan_noise(privacy, t) for t in lengths]  # noqa: E731
    monkeypatch.setattr(accounting_run, "account_apart", account)
    return asked


def test_advice_is_what_the_command_says(here) -> None:
    advised = dpprof.advise(methods=METHODS, **FIELDS)

    assert str(advised) + "\n" == (here / "said").read_text()
    assert advised.to_json() + "\n" == (here / "advice.json").read_text()
    assert advised.advices[0].best.method == "flash-bk"
    table = advised.table()
    assert list(table["method"]) == ["flash-bk", "standard"]
    assert list(table["safe_batch_size"]) == [8, 8]
    # 8 samples of 8 tokens in 1.5 s and in 1 s
    assert list(table["tokens_per_s"]) == pytest.approx([64 / 1.5, 64.0])
    assert "its peak, MiB" in advised.details
    assert "Safe: the allocator never has to release its cache" in advised.details
    html = advised._repr_html_()
    assert html.startswith(
        "<p>Use flash-bk, 8 samples at once (bfloat16, adamw-fused, CUDA graph): cust"
    )
    assert "<td>42.7</td>" in html
    with pytest.raises(
        InputError, match="plot: 8 is not allowed; it shows sequence lengths; give "
    ):
        advised.plot()


def test_a_budget_is_what_the_command_says(here) -> None:
    priced = dpprof.budget(methods=METHODS, accountant="rdp", **FIELDS, **SPENT)
    options = ["--samples=1e4", "--tokens=4e5", "--epsilon", "8", "6", "--delta=1e-5"]
    done = call("budget", *ASKED, *HERE, *options, "--accountant=rdp", "--json=b.json", cwd=here)

    assert str(priced) + "\n" == done.stdout
    assert priced.to_json() + "\n" == (here / "b.json").read_text()
    assert "noise multiplier" in priced.details
    costs = priced.table()
    assert list(costs[costs["method"] == "flash-bk"]["epsilon"]) == [8, 6]
    steps = 400_000 / 8 / priced.budget.noise.batch_size
    assert priced.budget.noise.planned.steps == math.ceil(steps)
    assert isinstance(priced.plot(), Figure)


def test_a_prediction_is_the_file_that_the_command_writes(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    sizes = {"batch_size": 2, "seq_len": 8, "target": "cpu"}
    options = [f"--{name.replace('_', '-')}={value}" for name, value in sizes.items()]
    told = dpprof.estimate(MODEL, "flash", **sizes)
    done = call("estimate", f"--model={MODEL}", "--method=flash", *options, cwd=tmp_path)  # kept
    experiment = told.result.experiment

    assert str(told) + "\n" == done.stdout
    assert told.result == read_result(result_path(tmp_path, "estimate", experiment.id, 0))
    assert json.loads(told.to_json())["experiment"]["batch_size"] == 2
    held = told.table()
    assert held["bytes"].sum() == told.result.memory.peak_allocated_bytes
    assert held["share"].sum() == pytest.approx(1)
    assert isinstance(told.plot(), Figure)
    same = dpprof.explain(told, told.result)
    assert same.difference.difference_bytes == 0
    assert list(same.table()["difference_bytes"].unique()) == [0]


def test_where_no_batch_fits_the_reason_is_raised(tmp_path, keep_capacities, monkeypatch) -> None:
    (tmp_path / "results" / "verify").mkdir(parents=True)
    keep_capacities(tmp_path, [*ASKED, *HERE], lambda _: None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(dpprof.PredictionError, match="flash-bk on custom: too large") as error:
        dpprof.capacity(method="flash-bk", **FIELDS)

    assert error.value.result.outcome == "oom"


def test_a_capacity_is_that_of_the_advice(here) -> None:
    fitting = dpprof.capacity(method="flash-bk", **FIELDS)

    assert (fitting.capacity.batch_size, fitting.capacity.safe_batch_size) == (10, 8)
    assert fitting.sentence == (
        "flash-bk on custom: a batch of 10 fits, and the largest safe one is 8."
    )
    assert [bool(one) for one in fitting.table()["fits"]] == [
        size <= 10 for size in fitting.table()["batch_size"]
    ]


def test_bad_keywords_are_the_sentences_of_the_command(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    right = {"model": "tiny", "method": "flash", "batch_size": 1, "seq_len": 8, "target": "l4"}

    def refusal_of(keywords) -> str:
        with pytest.raises(InputError) as refusal:
            dpprof.estimate(**right | keywords)
        assert list(tmp_path.iterdir()) == []
        return str(refusal.value)

    assert_sentences("answers/keywords", refusal_of)


def test_questions_refuse_what_their_commands_refuse(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    fields = {"model": "tiny", "seq_len": 8, "target": "l4"}
    for question, given, sentence in (
        (dpprof.advise, fields | {"batch_size": 2}, "batch_size: 2 is not allowed; the largest is"),
        (dpprof.advise, {"model": "tiny", "seq_len": 8}, "target: missing, and there is no"),
        (dpprof.advise, fields | {"methods": ["flash"] * 2}, "methods: 'flash flash' is not allow"),
        (dpprof.capacity, fields | {"method": "flsh"}, "methods: 'flsh' is not allowed; did you"),
        (dpprof.budget, fields, "missing: samples, tokens, epsilon"),
        (dpprof.verify, {"model": "tinny", "method": "flash"}, "model: 'tinny' is not allowed"),
        (dpprof.verify, {"method": "flash"}, "missing: model, or stand_in"),
        (dpprof.verify, {"model": lambda _: None, "method": "flash"}, "model: 'here:"),
        (dpprof.verify, {"model": "tiny", "method": "flash", "lora": 2}, "lora: only for hf:NAME"),
    ):
        with pytest.raises(InputError) as refusal:
            question(**given)
        assert str(refusal.value).startswith(sentence)


@pytest.mark.slow
@pytest.mark.parametrize("name", [one for one in dpprof.__all__ if one.islower()])
def test_examples_run(name, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    one = getattr(dpprof, name)
    module = sys.modules[one.__module__]
    (test,) = doctest.DocTestFinder(recurse=False).find(one, name, module=module, globs={})

    assert test.examples
    assert doctest.DocTestRunner().run(test).failed == 0


def test_what_is_no_result_cannot_be_explained() -> None:
    with pytest.raises(dpprof.InputError, match="1 is no result: give a file, or what estimate"):
        dpprof.explain(1, 2)
