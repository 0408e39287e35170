"""A run of one's own beside its prediction: how far off, what explains it, and its rows."""

import csv
from types import SimpleNamespace

import pytest
from factory import make_experiment
from snapshots import assert_sentences, refusals_of

import dpprof
from dpprof.ask import measured
from dpprof.ask.estimate import main
from dpprof.ask.measured import Measured, compare, write_rows
from dpprof.experiments.config import registry
from dpprof.predict.estimate import estimate
from evidence import read_rows
from predictions import describe_measured
from validate import measured_steps

ASKED = {"method": "standard", "batch_size": 3, "seq_len": 64, "device": "cuda", "target": "a100"}
ASKED |= {"model": {"vocab_size": 4000, "d_model": 16, "layers": 2, "heads": 2}}
IN_16_BITS = {"dtype": "bfloat16", "optimizer": "sgd"}


def predict_here(experiment, *_, **__) -> SimpleNamespace:
    found = estimate(experiment, lambda _: None)
    facts = {"experiment": experiment, "memory": found.memory, "time": found.time}
    return SimpleNamespace(**facts, started_at="2026-11-28")


def tell(result, peak=None, step=None) -> list[str]:
    return compare(result, Measured(measured_peak=peak, measured_step=step))


@pytest.fixture(autouse=True)
def _here(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(measured, "predict", predict_here)
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def result() -> SimpleNamespace:
    return predict_here(make_experiment(**ASKED, **IN_16_BITS))


@pytest.mark.parametrize(
    ("loop", "said"),
    [
        ({"keep_logits": True}, "0.0% more measured: --keep-logits next-forward, or --loop timm"),
        ({"loss_dtype": "logits"}, "0.0% more measured: --loss-dtype logits"),
        pytest.param(
            {"loop": "torchtune"},
            "0.0% more measured: --loop torchtune",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_peak_of_another_loop_is_explained_by_it(result, loop, said) -> None:
    other = predict_here(make_experiment(**ASKED, **IN_16_BITS, **loop)).memory.peak_allocated_bytes
    first, best, *_ = tell(result, peak=other)
    off = other / result.memory.peak_allocated_bytes - 1

    assert f"{abs(off):.1%} {'more' if off > 0 else 'less'} than predicted" in first
    assert best.endswith(said)


def test_a_peak_as_predicted_needs_no_explanation_and_a_wild_one_has_none(result) -> None:
    peak = result.memory.peak_allocated_bytes
    exact = tell(result, peak=peak)
    wild = tell(result, peak=20 * peak)

    assert len(exact) == 1
    assert "0.0% more than predicted (0.00 GiB)" in exact[0]
    assert "1900.0% more than predicted" in wild[0]
    assert "no other loss, kept logits or reserved memory explain it" in wild[1]


def test_a_peak_of_reserved_memory_is_recognised(result) -> None:
    told = tell(result, peak=result.memory.allocator.reserved_bytes)

    assert any(line.endswith("which nvidia-smi shows") and "0.0% more" in line for line in told)


def test_a_step_is_inside_the_interval_or_not(result) -> None:
    step = result.time.predicted_step_s

    (usual,) = tell(result, step=step.median)
    assert usual.startswith(
        f"measured {step.median * 1e3:,.1f} ms a step, 0.0% more than predicted"
    )
    assert usual.endswith("inside the 90 % interval")
    slow, why = tell(result, step=2 * step.high)
    assert "outside the 90 % interval" in slow
    assert f"the host is waited for in {step.waiting_share:.0%}" in why


@pytest.mark.parametrize(
    "fields",
    [
        ASKED | IN_16_BITS | {"loop": "timm", "loss_dtype": "logits"},
        ASKED | {"model": "small"},
        ASKED | {"model": "hf:llama-3.2-1b", "lora": "rank=4,target_modules=q_proj+v_proj"},
        ASKED | {"model": {"hf": "tiny-bert", "task": "masked-lm", "num_hidden_layers": 1}},
    ],
)
def test_rows_are_predicted_again_as_they_were_asked(fields, tmp_path) -> None:
    experiment = make_experiment(**fields)
    result = SimpleNamespace(experiment=experiment, started_at="2026-11-28")
    path = tmp_path / "measured.csv"
    for step in (0.2, 0.4):  # the second takes the place of the first
        write_rows(path, result, Measured(measured_peak="3GiB", measured_step=step))
    rows = read_rows("measured_steps", path)

    assert [(row.quantity, row.value) for row in rows] == [
        ("step time", 0.4),
        ("peak memory", 3 * 2**30),
    ]
    again = describe_measured(rows[0])
    assert again.target == registry.load("targets", "a100")
    assert again.model_copy(update={"target": "a100"}) == experiment


def test_the_page_of_measured_steps_takes_rows_of_peaks_alone(result, tmp_path) -> None:
    path = tmp_path / "measured.csv"
    write_rows(path, result, Measured(measured_peak=result.memory.peak_allocated_bytes))
    text = measured_steps(read_rows("measured_steps", path)).text

    assert "peak of allocated memory: median absolute error 0.0000%" in text
    assert "step time: none; 0 of 0 inside the interval" in text


def test_what_cannot_be_compared_is_a_sentence(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "other.csv").write_text("a,b\n1,2\n", encoding="utf-8")
    asked = {"model": "tiny", "method": "standard", "batch_size": 2, "seq_len": 8, "target": "a100"}
    refuse = refusals_of(lambda **keywords: dpprof.estimate(**asked | keywords))
    assert_sentences("cli/measured", refuse)


def test_the_command_prints_the_comparison_and_writes_the_table(tmp_path, capsys) -> None:
    asked = "--model tiny --method standard --batch-size 2 --seq-len 32 --target a100"
    main([*asked.split(), "--measured-step", "3", "--rows", "runs.csv"])
    printed = capsys.readouterr().out

    assert "\nmeasured 3,000.0 ms a step, " in printed
    assert "\nwritten to runs.csv; compare all its runs: perf/validate.py" in printed
    with (tmp_path / "runs.csv").open(encoding="utf-8") as file:
        assert [row["value"] for row in csv.DictReader(file)] == ["3.0"]
