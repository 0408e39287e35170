"""The published steps: what was copied is consistent, and predictions are those of an estimate."""

import math
import sys
from types import SimpleNamespace

import pytest
import yaml
from factory import make_experiment

import ranks
import step_time
from dpprof.experiments.config import registry
from dpprof.experiments.config.validation import InputError
from dpprof.experiments.records.result import PredictedTime
from dpprof.predict.estimate import estimate
from dpprof.predict.flops.cost import AttentionShape, Cost
from dpprof.predict.step_time.gpu_model import GpuModel
from dpprof.predict.step_time.op_time import OpTime
from older_kernels import KERNELS
from published_steps import Row, Source, predict, read_rows

ROWS = read_rows()
SOURCE = Source("one", "https://example.org", "a GPU", "h100", "nothing")
SIZE = {"vocab_size": 128, "d_model": 64, "layers": 2, "heads": 2}


def test_there_are_steps_of_enough_sources_and_every_source_says_what_differs() -> None:
    eager = [row for row in ROWS if not row.compiled]

    assert len(eager) >= 12
    assert len({row.source.url for row in eager}) >= 3
    for source in {row.source for row in ROWS}:
        assert source.url.startswith("https://github.com/")
        assert len(source.url.split("/")[6]) == 40  # a commit
        assert source.gpu
        assert source.differs


@pytest.mark.parametrize("row", [row for row in ROWS if row.mfu], ids=lambda row: row.label)
def test_tokens_per_second_and_utilisation_that_were_copied_agree(row) -> None:
    """Korthikanti et al. 2022, as both sources count: 6 P + 12 layers T d FLOPs a token."""
    model = row.model
    layers = model.get("layers") or model["num_hidden_layers"]
    d_model = model.get("d_model") or model["hidden_size"]
    flops = 6 * row.parameters + 12 * layers * d_model * row.seq_len
    peak = row.find_target().flops_per_s["bfloat16"]

    assert 100 * flops * row.tokens_per_s / peak == pytest.approx(row.mfu, abs=0.06)


def test_the_parameters_that_were_copied_are_those_of_the_model() -> None:
    for row in ROWS:
        if row.mfu and "d_model" in row.model:
            V, D, layers = (row.model[name] for name in ("vocab_size", "d_model", "layers"))
            blocks = layers * (12 * D**2 + 13 * D)
            assert row.parameters == V * D + row.seq_len * D + blocks + 2 * D


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"source": "none", "step_s": 1}, "source: 'none' is not allowed; it must be one of one"),
        ({"source": "one", "step_s": 1, "colour": 2}, "row: 'colour' is not allowed; keys are"),
        ({"source": "one", "label": "x"}, "must have one of tokens_per_s and step_s"),
        ({"source": "one", "label": "x", "step_s": 1, "tokens_per_s": 1}, "must have one of"),
    ],
)
def test_a_bad_row_is_refused_in_a_sentence(tmp_path, fields, message) -> None:
    path = tmp_path / "rows.yaml"
    path.write_text(yaml.safe_dump({"sources": {"one": SOURCE._asdict()}, "rows": [fields]}))

    with pytest.raises(InputError, match=message):
        read_rows(path)


def time_attention(model: GpuModel, *, is_backward: bool) -> OpTime:
    sizes = AttentionShape(64, 8192, 8192, 128, True, is_backward)
    return model.predict(Cost("flash", "attention", 10**12, "bfloat16", attention=sizes), 0)


@pytest.mark.parametrize(("is_backward", "slower"), [(False, (1.3, 1.5)), (True, (1.9, 2.1))])
def test_attention_of_2023_is_as_slow_as_its_successor_says(is_backward, slower) -> None:
    """Dao 2023, "FlashAttention-2", section 4.1: 1.3 to 1.5 times, and about 2 times backward."""
    target = registry.load("targets", "a100")
    now, then = (
        time_attention(kernels(target, "bfloat16"), is_backward=is_backward)
        for kernels in (KERNELS[""], KERNELS["triton-2023"])
    )

    assert slower[0] < then.seconds / now.seconds < slower[1]
    assert then.spread > now.spread


def test_nothing_but_attention_was_slower_in_2023() -> None:
    product = Cost("mm", "matmul", 2**31, "bfloat16", product=(1, 1024, 1024, 1024))
    target = registry.load("targets", "a100")
    now, then = (one(target, "bfloat16").predict(product, 2**22) for one in KERNELS.values())

    assert then == now


def test_every_published_step_names_kernels_whose_speed_is_known() -> None:
    named = {row.source.attention for row in ROWS}
    named |= {row.facts["attention"] for row in ranks.read_rows()}

    assert named == KERNELS.keys()


def test_a_prediction_is_that_of_an_estimate() -> None:
    row = Row(SOURCE, "small", 2, 32, model=SIZE, step_s=1.0)
    fields = {"model": SIZE, "batch_size": 2, "seq_len": 32, "dtype": "bfloat16"}
    experiment = make_experiment(**fields, method="standard", device="cuda", target="h100")

    assert predict(row) == estimate(experiment, lambda _: None).time.predicted_step_s


def test_gpus_share_an_update_and_batches_do_too() -> None:
    """Of so few tokens an update is most of the step, and a thousandth of it is nothing."""
    wide = {"vocab_size": 50_000, "d_model": 4096, "layers": 1, "heads": 2}
    row = Row(SOURCE, "wide", 1, 8, model=wide, step_s=1.0)
    alone = predict(row).median
    shared = predict(row._replace(source=SOURCE._replace(gpus=1000))).median
    halved = predict(row._replace(micro_batches=2)).median

    parameters = 50_000 * 4096 + 12 * 4096**2
    least_s = 28 * parameters / 3.35e12  # AdamW reads 16 and writes 12 bytes of each
    assert alone - shared > least_s
    assert alone - halved == pytest.approx((alone - shared) / 2, rel=0.02)
    assert predict(row._replace(micro_batches=1000)).median == shared


def test_a_program_of_the_sources_model_is_predicted_too() -> None:
    settings = {"T": 8, "D": 16, "H": 2, "layers": 1, "width": 32, "V": 11, "B": 2, "run_up": 1}
    row = Row(SOURCE, "x", 2, 8, "float32", step_s=1.0, program="llama_like.training")
    step = predict(row._replace(settings=settings | {"dtype": "float32"}))

    assert step.waiting_share > 0.5
    assert 1e-3 < step.median < 0.1


def compare(error: float, *, compiled: bool = False, name: str = "one") -> step_time.Compared:
    step = PredictedTime(
        median=1 + error,
        low=min(0.8, 1 + error),
        high=max(1.2, 1 + error),
        rests_on={"data sheet": 1.0},
        waiting_share=0.0,
    )
    row = Row(SOURCE._replace(name=name), "x", 1, 1, step_s=1.0, compiled=compiled)
    return step_time.Compared(row, step)


def test_compiled_steps_are_told_apart_and_steps_outside_their_interval_are_marked() -> None:
    eager = [compare(error) for error in (-0.3, 0.1, 0.2)]
    text = step_time.tabulate([*eager, compare(9, compiled=True)])

    assert "| all eager steps | 3 | +10.0% | 20.0% | 3 of 3 |" in text
    assert "| compiled, predicted as eager | 1 | +900.0% | 900.0% | 1 of 1 |" in text
    assert "800 to 1,200 |" in text
    outside = eager[1]._replace(row=eager[1].row._replace(step_s=2.0))
    assert "800 to 1,200 *" in step_time.tabulate([outside])


def test_every_step_is_a_point_of_the_figure() -> None:
    compared = [compare(0.1), compare(-0.1, name="two"), compare(1, compiled=True)]
    figure = step_time.draw([one.point for one in compared])
    axis = figure.axes[0]
    points = [line for line in axis.lines if line.get_marker() in ("o", "s")]

    assert [tuple(map(float, point.get_xydata()[0])) for point in points] == [
        (1.0, 1.1),
        (1.0, 0.9),
        (1.0, 2.0),
    ]
    assert points[2].get_markerfacecolor() == "white"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["one", "two"]
    assert math.isclose(*axis.lines[-1].get_xydata()[0])


def test_the_command_writes_a_table_and_a_figure(tmp_path, monkeypatch, capsys) -> None:
    table, figure = tmp_path / "t.md", tmp_path / "f.png"
    monkeypatch.setattr(step_time, "read_rows", lambda: [SimpleNamespace()])
    monkeypatch.setattr(step_time, "compare", lambda _: [compare(0.1)])
    monkeypatch.setattr(
        sys, "argv", ["step_time.py", "--output", str(table), "--figure", str(figure)]
    )
    step_time.main()

    assert "(f.png)" in table.read_text()
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert "| one | 1 |" in capsys.readouterr().out
