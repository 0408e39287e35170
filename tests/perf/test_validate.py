"""Rows of evidence.csv are predicted as an estimate does, and pages show what is computed."""

import math
import re
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from factory import make_experiment
from published.programs import private
from published.recording import Tape
from torch import nn

import validate
from dpprof.experiments.config import registry
from dpprof.experiments.records.result import PredictedTime
from dpprof.predict.estimate import estimate
from dpprof.predict.flops.cost import AttentionShape, Cost
from dpprof.predict.step_time.gpu_model import GpuModel
from dpprof.predict.step_time.intervals import widen
from dpprof.predict.step_time.op_time import OpTime
from evidence import MODELS, NOT_RECREATED, SOURCES, Row, Source, read_rows
from predictions import KERNELS, predict_private, predict_shared_step
from private_numbers import Number, compare, tabulate
from validate import Page, Step, tabulate_steps

SIZE = {"vocab_size": 128, "d_model": 64, "layers": 2, "heads": 2}
PRIVATE = read_rows("private_runs")
PAGE = (Path(validate.__file__).parent / "private_runs.md").read_text(encoding="utf-8")
CHEAP = "opacus-fusion/resnet18-017", "opacus-fusion/bert-base-005", "pv-table4/cnn-006"
FORKS = ["fork/kept", "fork/norms"]
TWO_PASSES = ["two-passes/per-layer", "two-passes/ghost", "two-passes/mixed"]
ROW = Row(
    id="step-0",
    page="step_time",
    source=Source("step", "step", "nothing"),
    gpu="a GPU",
    target="h100",
    model="small",
    method="standard",
    settings={},
    quantity="step time",
    value=1.0,
    unit="s",
    read_from="",
    not_predicted="",
)


def make_row(model: str = "small", source: Source = ROW.source, **settings: object) -> Row:
    sizes = {"label": "x", "batch_size": 2, "seq_len": 32}
    return ROW._replace(model=model, source=source, settings=sizes | settings)


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
    now, then = (
        kernels(target, "bfloat16").predict(product, 2**22) for kernels in KERNELS.values()
    )

    assert then == now


def test_a_prediction_is_that_of_an_estimate(monkeypatch) -> None:
    monkeypatch.setitem(MODELS, "small", SIZE)
    fields = {"model": SIZE, "batch_size": 2, "seq_len": 32, "dtype": "bfloat16"}
    experiment = make_experiment(**fields, method="standard", device="cuda", target="h100")
    estimated = estimate(experiment, lambda _: None).time.predicted_step_s

    step = widen(predict_shared_step(make_row()), experiment, registry.load("targets", "h100"))
    assert step == estimated


def test_gpus_share_an_update_and_batches_do_too(monkeypatch) -> None:
    """Of so few tokens an update is most of the step, and a thousandth of it is nothing."""
    wide = {"vocab_size": 50_000, "d_model": 4096, "layers": 1, "heads": 2}
    monkeypatch.setitem(MODELS, "wide", wide)
    alone, shared, halved, added = (
        predict_shared_step(make_row("wide", batch_size=1, seq_len=8, **settings)).median
        for settings in ({}, {"gpus": 1000}, {"accumulation": 2}, {"accumulation": 1000})
    )

    parameters = 50_000 * 4096 + 12 * 4096**2
    least_s = 28 * parameters / 3.35e12  # AdamW reads 16 and writes 12 bytes of each
    assert alone - shared > least_s
    assert alone - halved == pytest.approx((alone - shared) / 2, rel=0.02)
    assert added == shared


def test_a_program_of_the_sources_model_is_predicted_too() -> None:
    settings = {"T": 8, "D": 16, "H": 2, "layers": 1, "width": 32, "V": 11, "B": 2, "run_up": 1}
    program = settings | {"dtype": "float32"}
    step = predict_shared_step(make_row("llama_like.training", dtype="float32", program=program))

    assert step.waiting_share > 0.5
    assert 1e-3 < step.median < 0.1


def make_step(error: float, *, name: str = "step", **settings: object) -> Step:
    predicted = PredictedTime(
        median=1 + error,
        low=min(0.8, 1 + error),
        high=max(1.2, 1 + error),
        rests_on={"data sheet": 1.0},
        waiting_share=0.0,
    )
    return Step(make_row(source=Source(name, name), **settings), predicted)


def test_compiled_steps_are_told_apart_and_steps_outside_their_interval_are_marked() -> None:
    eager = [make_step(error) for error in (-0.3, 0.1, 0.2)]
    text = tabulate_steps([*eager, make_step(9, compiled=True)])

    assert "| all eager steps | 3 | +10.0% | 20.0% | 3 of 3 |" in text
    assert "| compiled, predicted as eager | 1 | +900.0% | 900.0% | 1 of 1 |" in text
    assert "800 to 1,200 |" in text
    outside = eager[1]._replace(row=eager[1].row._replace(value=2.0))
    assert "800 to 1,200 *" in tabulate_steps([outside])


def test_every_step_is_a_point_of_the_figure() -> None:
    steps = [make_step(0.1), make_step(-0.1, name="two"), make_step(1, compiled=True)]
    figure = validate.draw(steps)
    axis = figure.axes[0]
    points = [line for line in axis.lines if line.get_marker() in ("o", "s")]

    assert [tuple(map(float, point.get_xydata()[0])) for point in points] == [
        (1.0, 1.1),
        (1.0, 0.9),
        (1.0, 2.0),
    ]
    assert points[2].get_markerfacecolor() == "white"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["step", "two"]
    assert math.isclose(*axis.lines[-1].get_xydata()[0])


def test_the_command_writes_a_table_and_a_figure(tmp_path, monkeypatch, capsys) -> None:
    table, figure = tmp_path / "t.md", tmp_path / "f.png"
    steps = [make_step(0.1)]
    monkeypatch.setitem(validate.WRITERS, "ranks", lambda _: Page(tabulate_steps(steps), steps))
    options = ["--output", str(table), "--figure", str(figure)]
    monkeypatch.setattr(sys, "argv", ["validate.py", "ranks", *options])
    validate.main()

    assert "(f.png)" in table.read_text()
    assert figure.read_bytes().startswith(b"\x89PNG")
    assert "| step | 1 |" in capsys.readouterr().out


def make_private(method: str = "standard", value: float | None = 100.0, **changes: object) -> Row:
    settings = {"batch_size": changes.pop("batch_size", 8), "size": 32, "steps": 2}
    fields = {"id": "part-0", "page": "private_runs", "source": SOURCES["pv-fig3"], "model": "cnn"}
    fields |= {"quantity": "peak memory", "unit": "MiB", "target": "v100-16gb"}
    return ROW._replace(**fields | changes, method=method, value=value, settings=settings)


def test_times_are_those_of_a_sample() -> None:
    rates = make_private(quantity="throughput", value=250.0)
    times = make_private(quantity="step time", value=0.08)

    assert Number(rates, 1.0).published == 4
    assert Number(times, 1.0).published == pytest.approx(10)
    assert Number(make_private(value=None), 1.0).published is None


def test_ratios_divide_by_the_first_method_of_the_same_model_size_and_batch() -> None:
    rows = [
        make_private(),
        make_private("flash", 300.0),
        make_private("flash", 700.0, batch_size=16),
        make_private("flash-bk", None),
    ]
    numbers = compare(rows, lambda row: 50.0 if row.method == "standard" else 120.0)

    assert [n.error for n in numbers] == pytest.approx([-0.5, -0.6, 120 / 700 - 1, None])
    assert [n.ratios for n in numbers] == [None, (3.0, 2.4), None, None]
    assert numbers[1].ratio_error == pytest.approx(-0.2)
    assert "| out of memory | 120 | fits |" in tabulate(rows, numbers)


class _NoTape(Tape):
    """Marks nothing, so that programs run on real tensors."""

    def __init__(self) -> None:
        super().__init__(SimpleNamespace(enter=lambda _: None, counting=False, events=[]))


def small_model() -> nn.Module:
    torch.manual_seed(0)
    layers = nn.Conv2d(3, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten()
    return nn.Sequential(*layers, nn.Linear(4 * 25, 6), nn.LayerNorm(6)).double()


def make_task() -> private.Task:
    torch.manual_seed(1)
    x, labels = torch.randn(5, 3, 5, 5, dtype=torch.float64), torch.randint(6, (5,))
    return private.Task(small_model(), x, labels)


def clipped_sum(task: private.Task, bound: float) -> list[torch.Tensor]:
    """Clip by the definition: one sample after another."""
    total = [torch.zeros_like(p) for p in task.model.parameters()]
    for number in range(len(task.labels)):
        part = slice(number, number + 1)
        sample = task._replace(x=task.x[part], labels=task.labels[part])
        gradients = torch.autograd.grad(sample.losses("sum"), list(task.model.parameters()))
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        for into, gradient in zip(total, gradients, strict=True):
            into.add_(gradient, alpha=min(1.0, bound / float(norm)))
    return total


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
@pytest.mark.parametrize("method", [*FORKS, *TWO_PASSES])
def test_programs_of_other_methods_clip_each_sample(monkeypatch, method) -> None:
    """But ``fork/norms``, which weighs the mean of a loss that is summed already, as its source."""
    monkeypatch.setattr(private, "_BOUND", bound := 0.5)
    monkeypatch.setattr(private, "_SIGMA", 0.0)
    expected = clipped_sum(make_task(), bound)
    task = make_task()
    before = [p.detach().clone() for p in task.model.parameters()]
    optimizer = torch.optim.SGD(task.model.parameters(), lr=1.0)
    private._apply(method, task, optimizer).run(_NoTape())
    after = task.model.parameters()
    moved = [old - new.detach() for old, new in zip(before, after, strict=True)]

    if method == "fork/norms":
        again = make_task()
        plain = torch.autograd.grad(again.losses("sum"), list(again.model.parameters()))
        share = moved[0].flatten()[0] / plain[0].flatten()[0]
        expected = [share * gradient for gradient in plain]
    elif method in TWO_PASSES:
        expected = [gradient / len(task.labels) for gradient in expected]
    for step, clipped in zip(moved, expected, strict=True):
        torch.testing.assert_close(step, clipped, rtol=1e-4, atol=1e-7)


@pytest.mark.filterwarnings("ignore:Using a non-full backward hook")
def test_ghost_clipping_knows_the_layers_of_gpt2(monkeypatch) -> None:
    """Tied to nothing, and with a token that comes twice."""
    monkeypatch.setattr(private, "_BOUND", bound := 0.5)
    monkeypatch.setattr(private, "_SIGMA", 0.0)
    monkeypatch.setitem(private._GPT2, "gpt2", (8, 1, 2))
    torch.manual_seed(0)
    model = private._Gpt2("gpt2").double().eval()
    ids, labels = torch.tensor([[5, 7, 5, 9], [1, 2, 3, 4]]), torch.randint(50, (2, 3))
    task = private.Task(model, ids, labels)
    expected = clipped_sum(task, bound)
    before = [p.detach().clone() for p in model.parameters()]
    private._apply("two-passes/ghost", task, torch.optim.SGD(model.parameters(), lr=1.0)).run(
        _NoTape()
    )

    for old, new, clipped in zip(before, model.parameters(), expected, strict=True):
        torch.testing.assert_close(old - new.detach(), clipped / 2, rtol=1e-4, atol=1e-7)


def parse(line: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in line.strip("|").split("|"))


def rows_on_page() -> Counter[tuple[str, ...]]:
    """All cells but those of ratios, which need another row."""
    return Counter(
        parse(line)[:8] for line in PAGE.splitlines() if re.match(r"\| \S+ \| \S+ \|", line)
    )


def check_row(row: Row) -> None:
    assert tuple(Number(row, predict_private(row)).cells[:8]) in rows_on_page()


@pytest.mark.parametrize("name", CHEAP)
def test_the_page_shows_what_is_computed(name) -> None:
    [row] = [row for row in PRIVATE if row.id == name]
    check_row(row)


def test_the_page_shows_every_row() -> None:
    left = rows_on_page()
    for row in PRIVATE:
        if not row.not_predicted:
            cells = tuple(Number(row, 1.0).cells)
            key = next(key for key in left if key[:6] == cells[:6] and left[key])
            left[key] -= 1
    for why, text in NOT_RECREATED.items():
        count = sum(row.not_predicted == why for row in PRIVATE)
        assert f"| {count} | {text} |" in PAGE
    assert f"Of {len(PRIVATE)} published numbers " in PAGE


@pytest.mark.slow
@pytest.mark.parametrize("row", [r for r in PRIVATE if not r.not_predicted], ids=lambda r: r.id)
def test_the_page_shows_what_every_row_computes(row) -> None:
    check_row(row)
