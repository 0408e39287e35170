"""Ratios beside measured ones: the page and the documentation say what is computed."""

import re
import statistics
from collections import defaultdict
from pathlib import Path

import pytest
from fresh_process import ROOT

import ratios
from dpprof.experiments.records.advice import StepParts, Stretch
from dpprof.results.analysis.advice.ratios import compare, compare_apart, find_spread
from evidence import Row, Source
from predictions import split_measured
from ratios import Step, judge_by_others, pair_up, read_steps, summarise, tabulate

PAGE = Path(ratios.__file__).with_suffix(".md").read_text(encoding="utf-8")
DOCUMENT = (ROOT / "docs" / "validation.md").read_text(encoding="utf-8")
NOTHING = Stretch(0.0, {}, 0.0, 0.0)


@pytest.fixture(scope="module")
def pairs():
    return pair_up(read_steps())


def step(
    measured_s: float, predicted_s: float, name: str = "a", own: float = 1.0, **settings: object
) -> Step:
    """Invent a step of products alone; `name` is its source."""
    fields = {"id": f"{name}-0", "page": "private_runs", "source": Source(name, name)}
    fields |= {"gpu": "", "target": "h100", "model": "small", "quantity": "step time"}
    fields |= {"unit": "s", "read_from": "", "not_predicted": "", "value": 8 * measured_s}
    usual = {"method": "flash", "batch_size": 8, "size": 32, "steps": 2}
    method = (usual := {**usual, **settings}).pop("method")
    each = Stretch(predicted_s, {("forward", "gemm"): predicted_s}, 0.0, 0.0)
    known = {"device": "h100", "samples": 8, "spread": 0.1, "of_products": 0.05, "own": own}
    parts = StepParts(method=method, of_python=0.0, each=each, update=NOTHING, **known)
    return Step(Row(method=method, settings=usual, **fields), parts)


def test_the_page_shows_what_is_computed(pairs) -> None:
    assert f"{ratios.__doc__}\n{tabulate(pairs)}\n" == PAGE


def test_the_documentation_says_what_is_computed(pairs) -> None:
    rows = {line.split(" | ")[0][2:]: line for line in summarise(pairs)}
    told = re.findall(r"^\| (.+?) \|.*$", DOCUMENT.partition("## Ratios")[2], re.MULTILINE)

    named = [name for name in told if name in rows]
    assert len(named) > 4
    assert all(rows[name] in DOCUMENT for name in named)


def test_ratios_of_our_steps_are_as_near_as_promised(pairs) -> None:
    ours = [pair for pair in pairs if pair.first.is_ours]

    assert statistics.median(abs(pair.error) for pair in ours) <= 0.08
    assert sum(pair.is_inside for pair in ours) >= 0.85 * len(ours)


def test_intervals_hold_enough_published_ratios(pairs) -> None:
    others = [pair for pair in pairs if not pair.first.is_ours]

    assert sum(pair.is_inside for pair in others) >= 0.85 * len(others)


def test_what_is_kept_of_a_step_is_what_is_predicted(pairs) -> None:
    kept = next(pair.first for pair in pairs if pair.first.row.id == "measured-043")
    parts = split_measured(kept.row)

    assert compare(parts, kept.parts._replace(device=parts.device)).value == pytest.approx(
        1.0, 1e-4
    )
    assert parts.each.kernels == pytest.approx(kept.parts.each.kernels, 1e-4)
    assert (parts.own, parts.of_products) == (kept.parts.own, pytest.approx(kept.parts.of_products))


def read_tables(page: str) -> list[list[str]]:
    """Read the rows of a page's tables, without links; the first cell is the section's title."""
    text = (Path(ratios.__file__).parent / page).read_text(encoding="utf-8")
    rows, title = [], ""
    for line in re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text).splitlines():
        title = line if line.startswith("## ") else title
        rows.append([title, *(cell.strip(" *") for cell in line.strip("|").split("|"))])
    return rows


def judge_apart(steps: list[tuple[int, int, list[str]]]) -> tuple[float, bool]:
    """Compare the fewest GPUs with the most: how far off the ratio is, and whether it is inside.

    Steps have GPUs, samples, and the cells of the published and predicted time and interval.
    """
    told = []
    for _, samples, cells in (min(steps), max(steps)):
        ends = [*cells[:2], *cells[2].split(" to ")]
        told.append([float(cell.replace(",", "")) / samples for cell in ends])
    (published, predicted, *ends), (most, predicted_most, *ends_of_most) = told
    spreads = find_spread(*ends), find_spread(*ends_of_most)
    ratio = compare_apart(predicted / predicted_most, *spreads)
    return abs(ratio.value / published * most - 1), ratio.times(most / published).holds_one


def test_different_gpus_and_numbers_of_gpus_share_no_error() -> None:
    """The documentation says how far off their ratios are, which the pages of steps show."""
    on_gpus, on_numbers = defaultdict(list), defaultdict(list)
    for title, *cells in read_tables("step_time.md"):
        if title.startswith("## llm-foundry, ") and cells[3:4] and cells[3].isdigit():
            kind = ["A100", "H100"].index(title[-4:])
            on_gpus[tuple(cells[:3])].append((kind, int(cells[3]), cells[4:7]))
    for title, *cells in read_tables("ranks.md"):
        if title == "## Rows" and cells[2:3] and cells[2].isdigit():
            each, times = map(int, cells[5].split(" x "))
            model = re.sub(r", (fsdp|hsdp|ddp|none)[^,]*", "", cells[3])
            key = (*cells[:2], model, cells[4], each)
            on_numbers[key].append((int(cells[2]), each * times, cells[6:9]))

    for steps, count, inside, median in ((on_gpus, 11, 11, 0.123), (on_numbers, 21, 19, 0.042)):
        pairs = [judge_apart(some) for some in steps.values() if min(some)[0] < max(some)[0]]
        errors, are_inside = zip(*pairs, strict=True)
        assert (len(pairs), sum(are_inside)) == (count, inside)
        assert statistics.median(errors) == pytest.approx(median, abs=5e-4)


def test_steps_that_differ_in_the_batch_alone_are_no_pair() -> None:
    steps = [step(1.0, 1.0), step(1.1, 1.0, batch_size=4), step(2.0, 2.5, method="standard")]
    steps += [step(1.0, 1.0, size=64), step(1.0, 1.0, name="b")]
    pairs = pair_up(steps)

    assert [(pair.first, pair.second) for pair in pairs] == [
        (steps[0], steps[2]),
        (steps[1], steps[2]),
    ]
    assert pairs[0].measured == pytest.approx(0.5)
    assert pairs[0].error == pytest.approx(1.0 / 2.5 / 0.5 - 1)


@pytest.mark.parametrize(("off", "factor", "inside"), [(1.0, 1.0, 1), (1.1, 2.5, 1), (9.0, 3.0, 0)])
def test_a_source_is_judged_with_what_the_others_need(off, factor, inside) -> None:
    """Both ratios are off alike, so what one needs helps the other, up to the largest factor."""
    steps = [
        step(measured_s, predicted_s, name, method=method)
        for name in "ab"
        for method, measured_s, predicted_s in (("flash", 2.0 * off, 2.0), ("standard", 1.0, 1.0))
    ]

    judged = judge_by_others(pair_up(steps))
    assert [(one.factor, one.inside, one.pairs) for one in judged] == [(factor, inside, 1)] * 2
