"""Private training that others published: rows, programs of their methods, and the page."""

import re
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from published.programs import private
from published.recording import Tape
from torch import nn

import private_runs
from private_runs import MODELS, NOT_RECREATED, SOURCES, Compared, Row, compare, read_rows, tabulate

ROWS = read_rows()
PAGE = Path(private_runs.__file__).with_suffix(".md").read_text(encoding="utf-8")
CHEAP = "opacus-fusion/resnet18-017", "opacus-fusion/bert-base-005", "pv-table4/cnn-006"
FORKS = ["fork/kept", "fork/norms"]
TWO_PASSES = ["two-passes/per-layer", "two-passes/ghost", "two-passes/mixed"]


def make_row(method: str = "standard", **changes: object) -> Row:
    values = {"id": "one-0", "source": SOURCES["pv-fig3"], "model": "cnn", "method": method}
    values |= {"kind": "peak_memory_mib", "value": 100.0, "batch_size": 8, "size": 32, "steps": 2}
    return Row(**values | {"why": ""} | changes)


def test_every_row_has_a_source_or_a_reason() -> None:
    """458 numbers were collected; the numbers of each group say that none is left out."""
    groups = Counter(row.group for row in ROWS)

    assert len({row.id for row in ROWS}) == len(ROWS) == 458
    for group, count in groups.items():
        assert {row.id for row in ROWS if row.group == group} == {
            f"{group}-{number:03d}" for number in range(count)
        }
    for row in ROWS:
        assert (row.source is None) == bool(row.why)
        assert not row.why or row.why in NOT_RECREATED
        assert row.why or row.size
    for source in SOURCES.values():
        assert source.url.startswith("https://github.com/")
        assert source.find_target().memory_bytes > 10 * 2**30


def test_times_are_those_of_a_sample() -> None:
    assert make_row(kind="samples_per_s", value=250.0).published == 4
    assert make_row(kind="seconds_per_step", value=0.08).published == pytest.approx(10)
    assert make_row(value=None).published is None


def test_ratios_divide_by_the_first_method_of_the_same_model_size_and_batch() -> None:
    rows = [
        make_row(),
        make_row("flash", value=300.0),
        make_row("flash", value=700.0, batch_size=16),
        make_row("flash-bk", value=None),
    ]
    compared = compare(rows, lambda row: 50.0 if row.method == "standard" else 120.0)

    assert [one.error for one in compared] == pytest.approx([-0.5, -0.6, 120 / 700 - 1, None])
    assert [one.ratios for one in compared] == [None, (3.0, 2.4), None, None]
    assert compared[1].ratio_error == pytest.approx(-0.2)
    assert "| out of memory | 120 | fits |" in tabulate(rows, compared)


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
        one = task._replace(x=task.x[part], labels=task.labels[part])
        found = torch.autograd.grad(one.losses("sum"), list(task.model.parameters()))
        norm = torch.cat([g.flatten() for g in found]).norm()
        for into, gradient in zip(total, found, strict=True):
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
    for one, other in zip(moved, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-7)


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

    for old, new, one in zip(before, model.parameters(), expected, strict=True):
        torch.testing.assert_close(old - new.detach(), one / 2, rtol=1e-4, atol=1e-7)


def parse(line: str) -> tuple[str, ...]:
    return tuple(cell.strip() for cell in line.strip("|").split("|"))


def first_cells(one: Compared) -> tuple[str, ...]:
    """Return all cells but those of ratios, which need another row."""
    return parse(private_runs._lay_out(one))[:8]


def rows_on_page() -> Counter[tuple[str, ...]]:
    return Counter(
        parse(line)[:8] for line in PAGE.splitlines() if re.match(r"\| \S+ \| \S+ \|", line)
    )


@pytest.mark.parametrize("name", CHEAP)
def test_the_page_shows_what_is_computed(name) -> None:
    [row] = [row for row in ROWS if row.id == name]
    assert first_cells(Compared(row, private_runs.predict(row))) in rows_on_page()


def test_the_page_shows_every_row() -> None:
    left = rows_on_page()
    for row in ROWS:
        if not row.why:
            cells = first_cells(Compared(row, 1.0))
            key = next(one for one in left if one[:6] == cells[:6] and left[one])
            left[key] -= 1
    for why, text in NOT_RECREATED.items():
        count = sum(row.why == why for row in ROWS)
        assert f"| {count} | {text} |" in PAGE
    assert f"Of {len(ROWS)} published numbers " in PAGE


@pytest.mark.slow
@pytest.mark.parametrize("row", [row for row in ROWS if not row.why], ids=lambda row: row.id)
def test_the_page_shows_what_every_row_computes(row) -> None:
    assert first_cells(Compared(row, private_runs.predict(row))) in rows_on_page()


def test_models_of_dpprof_are_told_apart_from_programs() -> None:
    assert {row.model for row in ROWS if row.model in MODELS} == set(MODELS)
