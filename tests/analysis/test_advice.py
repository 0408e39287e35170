"""Ranking, from figures that are given."""

import math
from pathlib import Path

import pytest
from factory import make_capacity, make_experiment, make_memory, write_synthetic

from dpprof.experiments.records.advice import Advice
from dpprof.experiments.records.result import Result
from dpprof.experiments.records.verdict import Standing
from dpprof.results.analysis.advice.advice import advise


def result(
    folder: Path, method: str, step_s: float | None, way: str = "none", outcome="", **capacity
) -> Result:
    """Invent a capacity result; without a step's time, one that does not fit."""
    return write_synthetic(
        folder,
        make_experiment(method=method, checkpointing=way),
        instrument="capacity",
        recorded=make_capacity(step_s, **capacity),
        outcome=outcome or ("ok" if step_s else "oom"),
        message=f"{method} needs more",
    )


def ask(folder: Path, **times: float | None) -> Advice:
    named = {name.replace("_", "-"): step_s for name, step_s in times.items()}
    return advise([result(folder, name, step_s) for name, step_s in named.items()], {})


def test_methods_are_ranked_by_tokens_a_second_the_baseline_apart(tmp_path) -> None:
    advice = ask(
        tmp_path, standard=0.5, opacus_hooks=2.0, opacus_ghost=1.0, opacus_ew=1.1, microbatch=None
    )

    assert [(o.method, o.verdict) for o in advice.options] == [
        ("opacus-ghost", "first"),
        ("opacus-ew", "close"),
        ("opacus-hooks", "slower"),
        ("microbatch", "does not fit"),
        ("standard", "baseline"),
    ]
    assert advice.best.verified is None
    assert advice.best.tokens_per_s == pytest.approx(8 * 4 / 1.0)
    assert advice.best.tokens_per_s_low == pytest.approx(8 * 4 / 1.1)
    assert advice.best.tokens_per_s_high == pytest.approx(8 * 4 * 1.1)
    assert advice.best.tokens_per_s_at_most == pytest.approx(8 * 4 / 0.5)
    assert "Of the device's time, 75% interpolated, 25% data sheet. " in advice.sure_of_time
    assert advice.options[3].message == "microbatch needs more"
    assert advice.budget_bytes == 1000


@pytest.mark.parametrize(("factor", "verdict"), [(0.999, "close"), (1.001, "slower")])
def test_methods_are_close_where_the_interval_of_their_ratio_holds_one(
    tmp_path, factor, verdict
) -> None:
    """Both times may be 10 % off, and these results do not say which kernels both run."""
    ends = 1.1 ** math.sqrt(2)
    advice = ask(tmp_path, opacus_ghost=1.0, opacus_ew=ends * factor, standard=0.5)
    first, second, plain = advice.options

    assert second.verdict == verdict
    told = second.over_first, second.over_first_low, second.over_first_high
    assert told == pytest.approx((ends * factor, factor, ends**2 * factor))
    assert first.over_plain == pytest.approx(2)
    assert (first.over_first_low, first.over_first_high) == (1, 1)
    assert (plain.verdict, plain.ratio_reason) == ("baseline", None)


def test_a_ratio_of_an_unknown_time_is_null_with_a_reason(tmp_path) -> None:
    advice = ask(tmp_path, opacus_ghost=1.0, opacus_ew=None)

    assert advice.options[0].over_plain is None
    assert advice.options[0].ratio_reason == "there is nothing to compare with"
    assert advice.options[1].over_first is None
    assert advice.options[1].ratio_reason == "no time is predicted of opacus-ew"


def test_a_method_that_fits_but_not_safely_is_not_the_advice(tmp_path) -> None:
    tight = result(tmp_path, "opacus-hooks", 0.1, safe_batch_size=None, safe_peak_bytes=None)
    advice = advise([tight, result(tmp_path, "opacus-ghost", 9.0)], {})

    assert advice.best.method == "opacus-ghost"
    assert {o.method: o.verdict for o in advice.options}["opacus-hooks"] == "tight"


def test_without_a_predicted_time_methods_that_fit_are_not_ranked(tmp_path) -> None:
    found = result(tmp_path, "opacus-hooks", 1.0)
    advice = advise([found.model_copy(update={"time": None})], {})

    assert advice.best is None
    assert advice.options[0].verdict == "unranked"
    assert advice.options[0].safe_batch_size == 8
    assert advice.sure_of_time == "not predicted: no speeds of this device are known"


def test_a_method_with_a_wrong_gradient_is_never_advised(tmp_path) -> None:
    results = [
        result(tmp_path, method, step_s)
        for method, step_s in {"opacus-ew": 0.1, "opacus-ghost": 1.0, "standard": 0.5}.items()
    ]
    failed = Standing(verified=False, reason="relative error of the gradient: 1.0e-02")
    passed = Standing(verified=True, reason=None)
    standings = dict(zip((r.experiment_id for r in results), (failed, passed), strict=False))
    advice = advise(results, standings)

    assert [(o.method, o.verdict, o.verified) for o in advice.options] == [
        ("opacus-ghost", "first", True),
        ("opacus-ew", "wrong", False),
        ("standard", "baseline", None),
    ]
    assert "relative error of the gradient: 1.0e-02" in advice.options[1].message


def test_the_mechanism_is_told_and_what_is_not_private_is_no_advice(tmp_path) -> None:
    mechanisms = {"opacus-ew": "none", "opacus-adaptive": "adaptive flat clipping"}
    times = {"opacus-ew": 0.1, "opacus-adaptive": 1.0, "standard": 0.5}
    results = [result(tmp_path, method, step_s) for method, step_s in times.items()]
    standings = {
        one.experiment_id: Standing(True, None, mechanism=mechanisms.get(one.experiment.method))
        for one in results
    }
    advice = advise(results, standings)

    assert advice.best.method == "opacus-adaptive"
    assert {o.method: (o.private, o.mechanism) for o in advice.options} == {
        "opacus-adaptive": (True, "adaptive flat clipping"),
        "opacus-ew": (False, "none"),
        "standard": (False, None),
    }


WAYS = {
    "the fastest": ({"none": 2.0, "non-reentrant": 1.0, "reentrant": 4.0}, {}, "non-reentrant"),
    "the first of equals": ({"none": 1.0, "reentrant": 1.0}, {}, "none"),
    "none that is only tight": ({"none": 1.0, "reentrant": 3.0}, {"none": None}, "reentrant"),
    "what fits": ({"none": None, "reentrant": 3.0}, {}, "reentrant"),
    "what needs less": ({"none": None, "reentrant": None}, {}, "reentrant"),
}
"""Seconds of a step by checkpointing, safe batches that are not 8, and the way that is chosen."""


@pytest.mark.parametrize("case", WAYS)
def test_each_method_counts_with_the_checkpointing_that_trains_fastest(tmp_path, case) -> None:
    times, safe, chosen = WAYS[case]
    flash = [
        result(tmp_path, "flash", step_s, way, safe_batch_size=safe.get(way, 8))
        for way, step_s in times.items()
    ]
    advice = advise([*flash, result(tmp_path, "opacus-ghost", 9.0)], {})
    options = {option.method: option for option in advice.options}

    assert advice.checkpointing == "best"
    assert options["flash"].checkpointing == chosen
    speeds = {way: 8 * 4 / s if s and safe.get(way, 8) else None for way, s in times.items()}
    assert options["flash"].tokens_per_s_by_checkpointing == pytest.approx(speeds)
    assert options["opacus-ghost"].tokens_per_s_by_checkpointing is None
    fits = options["flash"].safe_batch_size is not None
    assert advice.best.method == ("flash" if fits else "opacus-ghost")
    if fits:
        assert advice.without_checkpointing.tokens_per_s == pytest.approx(speeds["none"])


def test_without_a_predicted_time_the_larger_safe_batch_decides(tmp_path) -> None:
    ways = {"none": 8, "reentrant": 9, "non-reentrant": 7}
    untimed = [
        result(tmp_path, "flash", None, way, "ok", safe_batch_size=safe)
        for way, safe in ways.items()
    ]
    [option] = advise(untimed, {}).options

    assert (option.checkpointing, option.safe_batch_size) == ("reentrant", 9)


ESTIMATES = {
    "between two": ({1: 500, 4: 600, 8: 700, 12: 780, 99: 9000}, 20),
    "from the last before the stated batch": ({1: 500, 4: 600, 7: 690}, 10),
    "from the stated batch, of which nothing else is known": ({11: 730, 12: 800}, 10),
}


@pytest.mark.parametrize("case", ESTIMATES)
def test_one_more_sample_costs_what_the_nearest_peaks_differ_by(tmp_path, case) -> None:
    peaks, costs = ESTIMATES[case]
    at_peak = {"parameters": 140, "saved_activations": 420, "logits_and_loss": 140}  # 8 samples
    found = make_capacity(1.0, estimates=peaks) | {"memory": make_memory(at_peak)["memory"]}
    flash = make_experiment(method="flash")
    fast = write_synthetic(tmp_path, flash, instrument="capacity", recorded=found)
    slow = result(tmp_path, "opacus-ghost", 9.0)
    sample = advise([slow, fast], {}).one_more_sample

    assert (sample.sample_bytes, sample.phase) == (costs, "backward")
    assert list(sample.peak_shares) == ["saved_activations", "parameters", "logits_and_loss"]
    assert list(sample.peak_shares.values()) == pytest.approx([0.6, 0.2, 0.2])
    assert advise([slow], {}).one_more_sample is None  # it does not say what its peak is
    alone = fast.model_copy(
        update={"capacity": fast.capacity.model_copy(update={"estimates": {8: 700}})}
    )
    assert advise([alone], {}).one_more_sample is None
