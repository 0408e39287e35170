"""The price of a budget from the command line, and what is refused before anything runs."""

import json
import shutil

import pytest
from documents import validate
from factory import (
    PRIVACY,
    make_capacity,
    make_experiment,
    make_noise,
    write_manifest,
    write_runs,
    write_synthetic,
)
from scripts import ASKED, HERE, call
from snapshots import assert_reviewed, assert_sentences

from dpprof.ask.budget_text import detail_budget, explain_choice, format_budget
from dpprof.experiments.accounting.noise import plan_noise
from dpprof.experiments.accounting.plan import describe_noise
from dpprof.experiments.launch import accounting_run
from dpprof.private.accounting.accountants import list_installed
from dpprof.private.accounting.noise_multiplier import find_noise_multiplier
from dpprof.private.accounting.schedule import Schedule
from dpprof.results.analysis.advice.budget import make_budget
from dpprof.results.analysis.tables.frames import read_table

SPENT = ["--samples=1e4", "--tokens=4e5", "--epsilon", "8", "6", "--delta=1e-5"]


@pytest.fixture(autouse=True)
def accounting_here(monkeypatch):
    """Ask the accountants in this process."""
    monkeypatch.setattr(
        accounting_run,
        "account_apart",
        lambda privacy, lengths: [plan_noise(privacy, t) for t in lengths],
    )


def test_a_budget_is_printed_and_written_for_programs(asked) -> None:
    options = ["--accountant=rdp", "--batch-size=512", "--price-per-hour=3.5", "--json=b.json"]
    done = call("budget", *ASKED, *HERE, *SPENT, *options, "--delta=1e-3", cwd=asked)
    found = json.loads((asked / "b.json").read_text())

    validate(found, "budget")
    assert found["privacy"]["samples"] == 10_000
    assert (found["noise"]["batch_size"], found["methods"][0]["steps"]) == (512, 98)
    assert [one["batch_size"] for one in found["noise"]["batches"]] == [128, 256, 512, 1024, 2048]
    rows = {(one["method"], one["epsilon"]): one for one in found["methods"]}
    assert set(rows) == {("standard", None), ("flash-bk", 8), ("flash-bk", 6)}
    private = rows["flash-bk", 8]
    assert private["micro_batch_size"] * private["accumulation_steps"] >= 512
    assert 0 < private["gpu_hours_low"] < private["gpu_hours"] < private["gpu_hours_high"]
    assert private["gpu_hours"] == pytest.approx(98 * private["step_s"] / 3600)
    assert private["price"] == pytest.approx(3.5 * private["gpu_hours"])
    assert private["hours_ratio"] > rows["standard", None]["hours_ratio"] == 1
    assert rows["flash-bk", 6]["batch_size"] > 512
    first, second, *_ = done.stdout.splitlines()
    assert first.startswith("Use flash-bk: 2.10 GPU hours (1.91 to 2.31 at 90 %), price 7.35, ")
    assert second.startswith("custom, 8 tokens, on l4, (8, 0.001)-DP: 98 steps of 512 samples")
    assert f"{private['noise_multiplier']:.3f}" in done.stdout
    assert "warning: delta 0.001 is above 1 / samples, 0.0001: publishing each" in done.stderr
    assert len(found["warnings"]) == 1


def test_bad_input_is_one_sentence_and_nothing_runs(tmp_path) -> None:
    def refusal_of(options: list[str]) -> str:
        done = call("budget", *ASKED, *SPENT, *options, cwd=tmp_path)
        # What no noise is enough for is found beside the first capacity.
        is_late = done.stderr.startswith("error: --epsilon: rdp knows no noise")
        left = {path.name for path in tmp_path.iterdir()} - ({"results"} if is_late else set())
        assert (done.returncode, left) == (1, set())
        shutil.rmtree(tmp_path / "results", ignore_errors=True)
        return done.stderr.removesuffix("\n")

    assert_sentences("cli/budget", refusal_of)


def test_what_is_missing_is_named(tmp_path) -> None:
    done = call("budget", *ASKED, *HERE, "--samples=9", cwd=tmp_path)

    assert done.stderr == "error: missing: --tokens, --epsilon\n"


def test_without_a_delta_it_is_a_tenth_of_one_over_the_samples(asked) -> None:
    spent = [text for text in SPENT if "delta" not in text]
    done = call("budget", *ASKED, *HERE, *spent, "--accountant=rdp", "--json=d.json", cwd=asked)

    assert json.loads((asked / "d.json").read_text())["privacy"]["delta"] == 1e-5
    assert "\nAssumed: delta 0.1 / samples; batches: " in done.stdout
    given = call("budget", *ASKED, *HERE, *SPENT, "--accountant=rdp", cwd=asked).stdout
    assert [a for a, b in zip(done.stdout, given, strict=False) if a != b][:1] == ["d"]


def test_the_tightest_accountant_is_taken_and_named(asked) -> None:
    spent = [text for text in SPENT if text != "6"]
    done = call("budget", *ASKED, *HERE, *spent, "--batch-size=512", "--json=t.json", cwd=asked)

    plan = json.loads((asked / "t.json").read_text())["noise"]
    planned = next(one for one in plan["batches"] if one["batch_size"] == 512)
    of = Schedule(10_000, 512, planned["steps"])
    found = {by: find_noise_multiplier(of, 8.0, 1e-5, by) for by in list_installed()}
    assert planned["accountant"] == min(found, key=found.get) != "rdp"
    assert planned["noise_multiplier"] == min(found.values())
    assert f"accountant {planned['accountant']}, the tightest here" in done.stdout.replace(
        "\n  ", " "
    )


def make(tmp_path, noise=None, **step):
    results = [
        write_synthetic(
            tmp_path,
            make_experiment(method=method, seq_len=8, device="cuda", target="h200"),
            instrument="capacity",
            recorded=make_capacity(step_s),
        )
        for method, step_s in {"standard": 500.0, "flash-bk": 1000.0}.items()
    ]
    return make_budget(results, {}, PRIVACY, noise or make_noise(8.0))


def test_a_screen_and_its_details_read_as_they_were_reviewed(tmp_path) -> None:
    """64 samples take 8 times 800 s and 200 s, 100 times, which are 183 hours, at 2 an hour."""
    budget = make(tmp_path)
    assert_reviewed("cli/hours", f"{format_budget(budget)}\n\n{detail_budget(budget)}\n")


def test_tables_of_a_config_with_a_budget_price_its_capacities(tmp_path) -> None:
    experiment = make_experiment(method="flash-bk", seq_len=8, device="cuda", target="h200")
    found = make_capacity(1000.0)
    spent = PRIVACY.model_copy(update={"batch_size": 64, "accountant": "rdp"})
    runs = write_runs(tmp_path, (experiment, "capacity", {"recorded": found}))
    manifest = runs.model_copy(update={"privacy": spent})
    write_manifest(tmp_path, manifest)

    given = [f"--manifest={manifest.path}", "--output-dir=tables"]
    done = call("tables", *given, cwd=tmp_path)

    assert done.returncode == 0, done.stderr
    noise, hours = (read_table(tmp_path / "tables" / f"{name}.csv") for name in ("noise", "budget"))
    assert list(noise["batch_size"]) == [16, 32, 64, 128, 256]
    [multiplier] = noise.loc[noise["chosen"], "noise_multiplier"]
    assert list(hours["epsilon"]) == [8, 2]
    assert hours["noise_multiplier"][0] == multiplier
    # 51,200 tokens are 100 steps of 64 samples of 8 tokens: as above.
    assert hours["gpu_hours"][0] == pytest.approx(100 * 6600 / 3600)


def test_the_choice_of_the_batch_is_explained() -> None:
    noise, larger = make_noise(8.0), describe_noise(Schedule(100_000, 128, 50), 0.6, None)
    noisier = noise.model_copy(update={"batches": [*noise.batches[:2], larger]})

    def explain(case) -> str:
        asked = PRIVACY.model_copy(update=case)
        return explain_choice(asked, noisier if case == {"least_steps": 50} else noise)

    assert_sentences("cli/choices", explain)
