"""The answers that the package holds: they are those of these sources, and to all questions."""

import functools
import importlib
import itertools
import json
import runpy
import sys
from pathlib import Path

import pytest
from fresh_process import run_captured
from same_numbers import assert_same
from scripts import ROOT, call

from dpprof.ask.advise import list_questions, read_options
from dpprof.ask.commands.capacities import make_parser, read_question
from dpprof.ask.layout import LINES, WIDTH
from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.planning import job_environment
from dpprof.experiments.planning.code_digest import (
    code_digest,
    read_anew,
    verdict_digest,
    verified_as,
)
from dpprof.experiments.records import answers
from dpprof.experiments.records.answers import kept_answers
from dpprof.experiments.records.result import Result
from dpprof.experiments.records.verdict import Verdict
from dpprof.predict.capacity import measure

KEPT = [name for name, text in kept_answers().items() if "experiment_id" in text]
SCRIPT = runpy.run_path(str(ROOT / "workflow" / "scripts" / "answers.py"))
FITS = vars(importlib.import_module("dpprof.ask.fits"))
APART = ("methods", "world_sizes", "again")
QUESTIONS = list(SCRIPT["find_questions"]())


@functools.cache
def read_kept() -> dict[str, Result]:
    """Return the answers that come with the package, by id."""
    results = [Result.model_validate_json(kept_answers()[name]) for name in KEPT]
    return {result.experiment_id: result for result in results}


@pytest.fixture
def in_shipped_environment(monkeypatch):
    """Take versions from the shipped environment, whichever are installed."""
    read_anew()
    monkeypatch.setattr(job_environment, "_pinned", {})  # undone afterwards
    job_environment.expect_environment(ROOT / "envs" / "dpprof.yaml")
    yield
    read_anew()


@pytest.mark.usefixtures("in_shipped_environment")
def test_each_answer_is_that_of_these_sources() -> None:
    outdated = [
        experiment_id
        for experiment_id, kept in read_kept().items()
        if kept.code_digest != code_digest("capacity", kept.experiment)
    ]

    assert KEPT
    assert not outdated, "run make answers"


def test_no_answer_names_a_file_of_where_it_was_found() -> None:
    found = [one for kept in read_kept().values() for one in (kept, *kept.attempts)]
    errors = [one.error for one in found if one.error]

    assert errors
    assert {one.log for one in errors} == {None}


def list_asked(question: list[str]) -> list[Experiment]:
    """Return the experiments that a question is about."""
    command, *options = question
    if command == "fits":
        target = options[options.index("--target") + 1]
        each = itertools.product(FITS["MODELS"], FITS["WAYS"], FITS["SEQ_LENS"])
        make = functools.partial(FITS["make_experiment"], for_question=True)
        return [make(FITS["_ask"](target, *one)) for one in each]
    if command == "advise":
        arguments = read_options(options)
    else:
        arguments, _ = make_parser(command, "").parse_known_args(options)
    asked = read_question(arguments)
    fields = {k: v for k, v in asked.items() if v is not None and k not in APART}
    fields.pop("batch_size", None)  # of a budget
    return list_questions(fields, *(asked[k] for k in APART[:2]))


@pytest.mark.parametrize("question", QUESTIONS, ids=" ".join)
@pytest.mark.usefixtures("in_shipped_environment")
def test_each_question_of_the_documentation_is_answered_on_a_screen(question, tmp_path) -> None:
    verdicts = [Verdict.model_validate_json(t) for t in kept_answers().values() if '"holes"' in t]
    verified = {(v.model, v.method): v.code_digest for v in verdicts}
    for one in list_asked(question):
        assert one.id in read_kept(), "run make answers"
        subject = verified_as(one), one.method
        assert verified.get(subject) == verdict_digest(*subject), "run make answers"
    done = call(*question, cwd=tmp_path)

    assert done.stderr == ""
    for answer in done.stdout.rstrip("\n").split("\n\n"):  # of fits one for each GPU
        lines = answer.splitlines()
        assert 3 <= len(lines) <= LINES
        assert max(map(len, lines)) <= WIDTH


@pytest.mark.usefixtures("in_shipped_environment")
def test_readme_shows_the_answer_to_its_first_question(tmp_path) -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = readme.partition("```text\n")[2].partition("```")[0]
    assert {one.id for one in list_asked(QUESTIONS[0])} <= read_kept().keys()

    assert call(*QUESTIONS[0], cwd=tmp_path).stdout.startswith(shown)


def test_a_kept_file_takes_the_place_of_one_on_other_code_alone(tmp_path, monkeypatch) -> None:
    kept = {"a.json": '{"code_digest": "new"}'}
    monkeypatch.setattr(answers, "kept_answers", lambda: kept)
    path = tmp_path / "results" / "a.json"

    def take(holding: str) -> str | None:
        answers.take_kept(path, holding=holding)
        return path.read_text() if path.exists() else None

    assert take("older") is None
    assert take("new") == kept["a.json"]
    path.write_text('{"code_digest": "old"}')
    assert take("older") == '{"code_digest": "old"}'
    assert take("new") == kept["a.json"]
    path.write_text('{"code_digest": "new", "mine": 1}')
    assert take("new") == '{"code_digest": "new", "mine": 1}'


def test_the_default_sweep_has_its_answers() -> None:
    _, asked = SCRIPT["plan_default_sweep"]()

    assert read_kept().keys() >= {one.id for one in asked}


def compare_with_fresh(kept: Result) -> None:
    """Compare all that a capacity says with what is found now, maybe by another processor."""
    fresh = measure(kept.experiment, lambda *_: None).model_dump(mode="json")
    known = kept.model_dump(mode="json")

    assert known["reasons"].items() >= fresh.pop("reasons").items()
    assert_same({name: known[name] for name in fresh}, fresh)


def test_an_answer_equals_a_fresh_one() -> None:
    """Here that which was found in the shortest time."""
    right = [one for one in read_kept().values() if one.outcome == "ok"]
    found = [one for one in right if one.experiment.method == "flash-bk"]
    compare_with_fresh(min(found, key=lambda one: one.wall_s))


@pytest.mark.slow
@pytest.mark.parametrize("name", KEPT)
def test_every_answer_equals_a_fresh_one(name) -> None:
    kept = Result.model_validate_json(kept_answers()[name])
    if kept.outcome == "ok":
        compare_with_fresh(kept)


def test_a_first_question_is_answered_without_torch(tmp_path: Path) -> None:
    asked = QUESTIONS[0]
    code = f"""
import sys
from dpprof.ask.commands.main import main
try:
    main({[*asked, "--json", "advice.json"]!r})
finally:
    assert "torch" not in sys.modules
"""
    done = run_captured([sys.executable, "-c", code], tmp_path)
    assert done.returncode == 0, done.stderr
    advice = json.loads((tmp_path / "advice.json").read_text())
    methods = {option["method"] for option in advice["options"]}

    assert methods > {"flash-bk", "opacus-ghost", "standard"}
    assert len(list(tmp_path.glob("results/capacity/*.json"))) == len(methods)
