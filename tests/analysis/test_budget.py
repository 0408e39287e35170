"""The price of a budget, from figures that are given."""

import math

import pytest
from factory import (
    PRIVACY,
    make_capacity,
    make_experiment,
    make_noise,
    tables_of_runs,
    write_synthetic,
)

from dpprof.ask.budget_text import format_budget
from dpprof.experiments.accounting.plan import AtEpsilon
from dpprof.experiments.records.budget import Budget
from dpprof.experiments.records.verdict import Standing
from dpprof.results.analysis.advice.budget import Planned, make_budget


def describe(method: str, gpus: int = 1):
    ranks = f"kind=fsdp,world_size={gpus}" if gpus > 1 else None
    return make_experiment(method=method, seq_len=8, device="cuda", target="h200", parallel=ranks)


def result(folder, method: str = "flash-bk", gpus: int = 1, outcome: str = "ok", **capacity):
    recorded = make_capacity(**{"step_s": 1.0} | capacity)
    run = {"instrument": "capacity", "recorded": recorded, "outcome": outcome}
    return write_synthetic(folder, describe(method, gpus), **run)


def price(results, standings=None, noise=None, **fields) -> Budget:
    privacy = PRIVACY.model_copy(update=fields)
    return make_budget(results, standings or {}, privacy, noise or make_noise(8.0))


def ask(folder, price_per_hour: float | None = 2.0, **methods) -> Budget:
    results = [result(folder, name.replace("_", "-"), **how) for name, how in methods.items()]
    return price(results, price_per_hour=price_per_hour)


def test_a_step_is_its_samples_at_the_safe_batchs_speed_and_one_update(tmp_path) -> None:
    budget = ask(tmp_path, flash_bk={"step_s": 1.0})

    planned, other = budget.methods
    # 8 samples take 0.8 s, and the update 0.2 s: 64 samples in 8 micro-batches take 6.4 + 0.2 s.
    assert (planned.accumulation_steps, planned.micro_batch_size) == (8, 8)
    assert planned.step_s == pytest.approx(6.6)
    assert planned.gpu_hours == pytest.approx(100 * 6.6 / 3600)
    assert planned.gpu_hours_low == pytest.approx(100 * 6.6 / 3600 / 1.1)
    assert planned.gpu_hours_high == pytest.approx(100 * 6.6 / 3600 * 1.1)
    assert planned.price == pytest.approx(2 * 100 * 6.6 / 3600)
    assert planned.most_kwh == pytest.approx(0.7 * 100 * 6.6 / 3600)  # 700 W
    # A quarter of the epsilon takes four times the batch, in as many steps.
    assert (other.epsilon, other.batch_size, other.steps) == (2, 256, 100)
    assert other.step_s == pytest.approx(25.8)
    assert (planned.noise_multiplier, other.noise_multiplier) == (0.5, 2.0)
    assert other.same_batch_noise_multiplier == 1.0


def test_several_gpus_share_a_batch_and_all_their_hours_are_paid(tmp_path) -> None:
    budget = price([result(tmp_path), result(tmp_path, gpus=4)])

    one, four = (cost for cost in budget.methods if cost.epsilon == 8)
    # 64 samples are 16 on each of four: 2 micro-batches of 8 take 1.6 s, and the update 0.2 s.
    assert (one.gpus, four.gpus) == (1, 4)
    assert (four.accumulation_steps, four.micro_batch_size) == (2, 8)
    assert four.step_s == pytest.approx(1.8)
    assert four.gpu_hours == pytest.approx(4 * 100 * 1.8 / 3600)
    assert four.price == pytest.approx(2 * four.gpu_hours)
    text = format_budget(budget)
    assert "Fewest GPU hours: flash-bk on 1 GPU; flash-bk on 4 may take as few." in text
    [header] = [line for line in text.splitlines() if line.startswith("method ")]
    assert header.split()[:2] == ["method", "GPUs"]
    assert header.split()[-4:] == ["hours", "price", "x", "standard"]


def test_a_method_that_failed_verification_takes_not_the_fewest_hours(tmp_path) -> None:
    runs = [result(tmp_path, "opacus-ghost"), *(result(tmp_path, gpus=gpus) for gpus in (2, 4))]
    budget = price(runs, {runs[0].experiment_id: Standing(False, "another gradient")})

    hours = {cost.gpus: cost.gpu_hours for cost in budget.methods if cost.epsilon == 8}
    assert hours[1] < hours[2] < hours[4]
    text = format_budget(budget)
    assert "Fewest GPU hours: flash-bk on 2 GPUs; flash-bk on 4 may take as few." in text


@pytest.mark.parametrize(("step_s", "verdict"), [(1.1, "close"), (1.2, "slower")])
def test_hours_are_judged_by_their_ratio_to_the_fewest(tmp_path, step_s, verdict) -> None:
    budget = ask(tmp_path, flash_bk={"step_s": 1.0}, flash={"step_s": step_s})

    judged = {(c.method, c.epsilon): (c.over_cheapest, c.cost_verdict) for c in budget.methods}
    assert judged["flash-bk", 8.0] == (1.0, "first")
    assert judged["flash", 8.0] == (pytest.approx(step_s), verdict)
    assert judged["flash", 2.0] == (pytest.approx(step_s), verdict)


def test_micro_batches_are_equal_parts_of_what_safely_fits(tmp_path) -> None:
    [planned, _] = ask(tmp_path, flash={"safe_batch_size": 60, "stated_batch_size": 60}).methods

    assert (planned.accumulation_steps, planned.micro_batch_size) == (2, 32)
    assert planned.message is None


def test_standard_is_the_price_of_privacy(tmp_path) -> None:
    budget = ask(tmp_path, standard={"step_s": 0.5}, flash_bk={"step_s": 1.0})

    ratios = {(one.method, one.epsilon): one.hours_ratio for one in budget.methods}
    assert ratios == {
        ("flash-bk", 8.0): pytest.approx(2.0),
        ("flash-bk", 2.0): pytest.approx(2 * 25.8 / 6.6),
        ("standard", None): pytest.approx(1.0),
    }
    planned, _, standard = budget.methods
    # Both times may be 10 % off, and these results do not say which kernels both run.
    off = 1.1 ** math.sqrt(2)
    ends = planned.hours_ratio_low, planned.hours_ratio_high
    assert ends == pytest.approx((2.0 / off, 2.0 * off))
    assert (standard.over_cheapest, standard.cost_verdict) == (None, None)
    assert (standard.noise_multiplier, standard.batch_size, standard.private) == (None, 64, False)


def test_without_standard_or_a_price_there_is_no_ratio_and_no_price(tmp_path) -> None:
    [planned, _] = ask(tmp_path, None, flash_bk={}).methods

    assert planned.gpu_hours
    assert (planned.hours_ratio, planned.price) == (None, None)
    assert ask(tmp_path, 0.0, flash_bk={}).methods[0].price == 0


def test_what_has_no_hours_says_why(tmp_path) -> None:
    tight = {"safe_batch_size": None, "safe_peak_bytes": None}
    budget = ask(tmp_path, flash=tight, flash_bk={"step_s": None}, opacus_hooks={"outcome": "oom"})

    told = {one.method: one for one in budget.methods if one.epsilon == 8}
    assert all(one.gpu_hours is one.over_cheapest is None for one in told.values())
    assert told["flash"].message == "it fits, but with nothing to spare: see capacity"
    assert told["flash-bk"].message == "no time is predicted for this target"
    assert told["flash-bk"].accumulation_steps == 8
    assert told["opacus-hooks"].message == "it broke"


def test_micro_batches_smaller_than_the_method_takes_have_no_hours(tmp_path) -> None:
    fits = {"safe_batch_size": 60, "stated_batch_size": 60, "smallest_batch_size": 32}
    assert ask(tmp_path, opacus_adaptive=fits).methods[0].micro_batch_size == 32

    [planned, _] = ask(tmp_path, opacus_adaptive=fits | {"smallest_batch_size": 33}).methods
    assert (planned.accumulation_steps, planned.gpu_hours) == (None, None)
    assert planned.message == "micro-batches would have 32 samples, and it takes 33 or more"


def test_a_batch_smaller_than_the_one_that_was_timed_is_noted(tmp_path) -> None:
    [planned, _] = ask(tmp_path, flash={"safe_batch_size": 80, "stated_batch_size": 80}).methods
    note = "time is predicted of a batch of 80: one so small may take longer a sample"

    assert (planned.accumulation_steps, planned.micro_batch_size) == (1, 64)
    assert planned.message == note


def test_an_epsilon_beyond_reach_has_no_hours(tmp_path) -> None:
    noise = make_noise(8.0)
    unknown = dict.fromkeys(("batch_size", "noise_multiplier", "tokens"))
    reason = "no batch is so large"
    beyond = AtEpsilon(epsilon=0.1, same_batch_noise_multiplier=9.0, **unknown, reason=reason)
    noise = noise.model_copy(update={"epsilons": [noise.epsilons[0], beyond]})

    budget = price([result(tmp_path)], noise=noise)

    assert budget.methods[1].gpu_hours is None
    assert budget.methods[1].message == "no batch is so large"
    assert budget.methods[1].same_batch_noise_multiplier == 9


def test_the_standing_of_a_method_is_told(tmp_path) -> None:
    run = result(tmp_path)
    standing = Standing(True, None, mechanism="hooked clipping")
    budget = price([run], {run.experiment_id: standing})

    assert (budget.methods[0].verified, budget.methods[0].mechanism) == (True, "hooked clipping")


def tables_of(root, planned):
    runs = [
        (describe(method), "capacity", {"recorded": make_capacity()})
        for method in ("standard", "flash-bk")
    ]
    return tables_of_runs(root, *runs, planned=planned)


def test_the_tables_have_every_method_epsilon_and_batch(tmp_path) -> None:
    tables = tables_of(tmp_path, Planned(PRIVACY, {8.0: make_noise(8.0)}))

    budget, noise = tables["budget"], tables["noise"]
    assert list(budget["method"]) == ["flash-bk", "flash-bk", "standard"]
    assert list(budget["epsilon"].fillna(0)) == [8, 2, 0]
    assert list(budget["target"]) == ["h200"] * 3
    assert list(noise["batch_size"]) == [32, 64, 128]
    assert list(noise["chosen"]) == [False, True, False]
    assert set(noise["delta"]) == {1e-6}
    assert tables["findings"].empty


def test_a_weak_delta_is_a_finding(tmp_path) -> None:
    weak = PRIVACY.model_copy(update={"delta": 1e-3})
    findings = tables_of(tmp_path, Planned(weak, {8.0: make_noise(8.0)}))["findings"]

    assert list(findings["kind"]) == ["weak-privacy-budget"]
    assert "would publish 100 of them on average" in findings["finding"][0]


def test_without_a_plan_the_reason_is_the_row_and_without_a_budget_there_is_none(tmp_path) -> None:
    [message] = tables_of(tmp_path, Planned(PRIVACY, reason="it took too long"))["budget"][
        "message"
    ]
    nothing = tables_of(tmp_path, None)

    assert message == "it took too long"
    assert nothing["budget"].empty
    assert nothing["noise"].empty
