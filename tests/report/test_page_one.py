"""Page one: its words are reviewed snapshots, its numbers recomputed from the JSON files."""

import itertools
import json
import re
from statistics import median

import numpy as np
import pytest
from factory import (
    PRIVACY,
    make_capacity,
    make_experiment,
    make_manifest,
    make_memory,
    make_noise,
    tables_of_runs,
    write_synthetic_verdict,
)
from reading import trust_of
from snapshots import assert_reviewed

from dpprof.experiments.accounting.plan import NoiseOfMechanism
from dpprof.results.analysis.advice.budget import Planned
from dpprof.results.analysis.collection import collect
from dpprof.results.analysis.selection import find_trainings
from dpprof.results.analysis.tables.build import build_tables
from dpprof.results.figures.prices import draw_budget
from dpprof.results.report.content import build_document
from dpprof.results.report.page.data import list_trainings
from dpprof.results.report.rendering.document import Drawing, Picture, Table
from dpprof.results.report.wording import name_trainings, spell_large

SETTINGS = ((8, "float32"), (16, "float32"), (16, "bfloat16"))
METHODS = ("standard", "opacus-ghost", "opacus-hooks", "flash-bk")
GIB = 2**30
STEP_S = {"standard": 1.0, "opacus-ghost": 1.9, "flash-bk": 1.15}
SAFE = {"standard": 35, "opacus-ghost": 20, "flash-bk": 34}
NEEDS = {"standard": 21, "opacus-ghost": 30, "flash-bk": 24}
DRAWN = [Drawing(name=name, caption=f"{name}.", missing=None) for name in ("tradeoff", "predicted")]
DDP, FSDP, FSDP_4 = (
    {"kind": kind, "world_size": size} for kind, size in (("ddp", 2), ("fsdp", 2), ("fsdp", 4))
)


def needs(method):
    """A predicted peak on an H100."""
    on_h100 = make_experiment(
        method=method, model="tiny", seq_len=32, batch_size=8, device="cuda", target="h100"
    )
    return on_h100, "estimate", {"recorded": make_memory({"parameters": NEEDS[method] * GIB})}


def fits(method, step_s, target="h200", **axes):
    """A capacity on a GPU with a predicted step time."""
    experiment = make_experiment(method=method, device="cuda", target=target, **axes)
    return experiment, "capacity", {"recorded": make_capacity(step_s)}


def updates(method, step_s, update_s):
    """A capacity of which an update of the parameters takes this long."""
    experiment, instrument, fields = fits(method, step_s)
    step = fields["recorded"]["time"]["predicted_step_s"]
    step["without_update"] = step["median"] - update_s
    return experiment, instrument, fields


def fails(method, outcome, instrument="clean", **fields):
    target = {"device": "cuda", "target": "h200"} if instrument == "capacity" else {}
    return make_experiment(method=method, **target), instrument, {"outcome": outcome, **fields}


def takes(method, step_s, model=None, **fields):
    """A step time that was measured here."""
    named = {} if model is None else {"model": model}
    return make_experiment(method=method, **named), "clean", {"step_s": (step_s,), **fields}


def write_sweep(root):
    """Times and peaks of four methods here, capacities on an H200, peaks on an H100."""
    draw = np.random.default_rng(7)
    runs = []
    for rank, method in enumerate(METHODS):
        for batch, number in itertools.product((2, 3), range(3)):
            figures = {
                "replicate": number,
                "step_s": tuple(draw.normal(0.01 * batch * (1 + rank), 1e-4, 5)),
                "peak_allocated_bytes": 2**20 * batch * (5 - rank if rank else 4),
            }
            runs.append((make_experiment(method=method, batch_size=batch), "clean", figures))
    for method, step_s in STEP_S.items():
        on_h200 = make_experiment(
            method=method, model="1b", seq_len=1024, batch_size=1, device="cuda", target="h200"
        )
        sizes = {"safe_batch_size": SAFE[method], "stated_batch_size": SAFE[method]}
        capacity = make_capacity(step_s, **sizes)
        capacity["compute"] |= {"dp_flop_multiplier": 1 + step_s / 10}
        runs += [(on_h200, "capacity", {"recorded": capacity}), needs(method)]
    return tables_of_runs(root, *runs)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    root = tmp_path_factory.mktemp("sweep")
    tables = write_sweep(root)
    documents = [json.loads(path.read_text()) for path in root.glob("results/*/*.json")]
    return build_document(tables, DRAWN), [one for one in documents if "instrument" in one]


@pytest.fixture(scope="module")
def page(written):
    return written[0]


@pytest.fixture(scope="module")
def files(written):
    return written[1]


def page_of(root, *runs, budget=False, verdicts=(), change=lambda tables: tables):
    """The report of runs, of which some have another verdict than that they are right."""
    for (experiment, *_), passed in verdicts:
        write_synthetic_verdict(root, experiment, passed=passed, reason="a reason")
    planned = Planned(PRIVACY, {4.0: make_noise(4.0)}) if budget else None
    return build_document(change(tables_of_runs(root, *runs, planned=planned)), [])


def spell(page) -> str:
    """Page one as text: question, answer, the table behind it, and how far to believe it."""
    lines = [page.question, "", *page.headline]
    for section in page.sections[:2]:
        lines += ["", section.title]
        for block in section.blocks:
            if isinstance(block, Table):
                lines += [" | ".join(row) for row in (block.header, *block.rows)]
                lines += [block.caption]
            else:
                lines += [block.name] if isinstance(block, Picture) else block.items
    return "\n".join(lines) + "\n"


def widen(tables):
    """Say that the wider of synthetic models, which have as many parameters, has more."""
    wider = tables["experiments"]["model"].str.contains("d8")
    grown = tables["experiments"].assign(parameters_total=np.where(wider, 99, 10))
    return tables | {"experiments": grown}


def let_noise_cost_time(tables):
    costs = tables["budget"]
    hours = costs["method"].map({"flash": 9.0, "flash-bk": 4.0})
    return tables | {"budget": costs.assign(gpu_hours=hours)}


def models(*sizes):
    return [{"vocab_size": 16, "d_model": size, "layers": 1, "heads": 2} for size in sizes]


def sweep(*runs, **options):
    """The runs of a sweep, and what else is known of it."""
    return runs, options


GHOST = fits("opacus-ghost", 1.0)
UNKNOWN = takes("opacus-ghost", 0.01)
MIB = {"peak_allocated_bytes": 2**20}
OTHERS = ("h100", "b200", "l40s", "a10g")
SWEEPS = {
    "peaks on a target": sweep(*map(needs, NEEDS)),
    "measured here": sweep(
        *(takes(*one, **MIB) for one in (("standard", 0.01), ("flash-bk", 0.012), ("flash", 0.03)))
    ),
    "predictions alone": sweep(
        *(fits(m, s, seq_len=8, batch_size=1) for m, s in (("standard", 1.0), ("flash-bk", 1.05)))
    ),
    "a budget": sweep(fits("standard", 1.0), fits("flash-bk", 1.25), budget=True),
    "another gpu as cheap": sweep(
        *(fits("flash-bk", 1.0), fits("flash-bk", 1.12, "h100"), fits("flash", 1.3, "h100")),
        budget=True,
    ),
    "another gpu not as cheap": sweep(
        *(fits("flash-bk", 1.0), fits("flash-bk", 1.25, "h100"), fits("flash", 1.3, "h100")),
        budget=True,
    ),
    "many gpus as cheap": sweep(
        fits("flash-bk", 1.0), *(fits("flash-bk", 1.1, target) for target in OTHERS), budget=True
    ),
    "noise costs time": sweep(
        fits("flash", 2.0), fits("flash-bk", 3.0), budget=True, change=let_noise_cost_time
    ),
    "a budget without times": sweep(fits("standard", None), fits("flash-bk", None), budget=True),
    "a budget and a slow update": sweep(
        updates("flash-bk", 1.05, 0.9), updates("opacus-ghost", 1.0, 0.05), budget=True
    ),
    "one capacity": sweep(fits("flash-bk", 1.0)),
    "ranks of two kinds": sweep(
        *(fits(m, s, parallel=FSDP) for m, s in (("flash-bk", 1.3), ("standard", 1.2))),
        *(fits(m, s, parallel=DDP) for m, s in (("flash-bk", 1.0), ("standard", 0.5))),
    ),
    "two ways of checkpointing": sweep(
        *(fits("flash-bk", 1.0, checkpointing=way) for way in ("none", "reentrant"))
    ),
    "several settings": sweep(
        *(fits("flash-bk", 1.0, seq_len=length, dtype=dtype) for length, dtype in SETTINGS),
        *(fits("flash-bk", 1.0, checkpointing="reentrant", seq_len=n) for n in (8, 16)),
    ),
    "two lengths": sweep(*(fits("flash-bk", 1.0, seq_len=length) for length in (8, 16))),
    "out of memory on one gpu": sweep(
        fails("flash-bk", "oom", "capacity"), fits("flash-bk", None, parallel=FSDP)
    ),
    "close methods": sweep(fits("opacus-ghost", 1.01), fits("flash-bk", 1.0)),
    "no predicted time": sweep(fits("flash-bk", None)),
    "only failures": sweep(
        fails("flash-bk", "crashed", message="<b>no</b> \\input{x} $(y)"),
        fails("opacus-ghost", "oom"),
    ),
    "one experiment": sweep(takes("flash-bk", 0.0123, peak_allocated_bytes=3 * 2**20)),
    "plain training alone": sweep(takes("standard", 0.01)),
    "a wrong method": sweep(GHOST, fits("flash-bk", 2.0), verdicts=[(GHOST, False)]),
    "a wrong method alone": sweep(GHOST, verdicts=[(GHOST, False)]),
    "a wrong method on one gpu": sweep(
        GHOST, fits("flash-bk", 1.0, parallel=FSDP), verdicts=[(GHOST, False)]
    ),
    # 64 tokens/s of two GPUs are fewer of each than 40 of one.
    "fewer gpu hours": sweep(fits("flash-bk", 0.8), fits("flash-bk", 1.0, "h100", parallel=FSDP)),
    "plain training on a target": sweep(fits("standard", 1.0)),
    "refused on a target": sweep(fails("flash-bk", "unsupported", "capacity")),
    "without standard": sweep(
        *(
            takes(method, step_s, peak_allocated_bytes=int(step_s * 1e8))
            for method, step_s in (("flash-bk", 0.01), ("flash", 0.03), ("opacus-hooks", 0.02))
        )
    ),
    "a failure beside successes": sweep(
        takes("standard", 0.01), takes("flash-bk", 0.02), fails("opacus-hooks", "oom")
    ),
    "the largest of two models": sweep(
        *(
            takes(method, step_s, model)
            for model, step_s in zip(models(4, 8), (0.01, 0.05), strict=True)
            for method in ("standard", "flash-bk")
        ),
        change=widen,
    ),
    "an unverified method": sweep(UNKNOWN, verdicts=[(UNKNOWN, None)]),
}


@pytest.mark.parametrize("name", SWEEPS)
def test_page_one_reads_as_it_was_reviewed(name, tmp_path) -> None:
    runs, options = SWEEPS[name]

    assert_reviewed(f"report/{name}", spell(page_of(tmp_path, *runs, **options)))


def test_page_one_of_a_sweep_of_everything_reads_as_it_was_reviewed(page) -> None:
    assert_reviewed("report/everything", spell(page))


def test_no_result_at_all_is_said(tmp_path) -> None:
    tables = build_tables(collect(make_manifest((make_experiment(), 0)), tmp_path, partial=True))
    page = build_document(tables, [])

    assert page.question == ""
    assert page.headline == ("Nothing can be told yet: no planned run has a result.",)


def named(files, instrument):
    return {f["experiment"]["method"]: f for f in files if f["instrument"] == instrument}


def here(files, batch=2):
    """By method: the step of each process in seconds, and the peak in bytes."""
    steps, peaks = {}, {}
    for one in files:
        if one["instrument"] == "clean" and one["experiment"]["batch_size"] == batch:
            method = one["experiment"]["method"]
            steps.setdefault(method, []).append(median(one["time"]["step_s"]))
            peaks[method] = one["memory"]["peak_allocated_bytes"]
    return steps, peaks


def speed(file):
    tokens = file["capacity"]["stated_batch_size"] * file["experiment"]["seq_len"]
    return tokens / file["time"]["predicted_step_s"]["median"]


def three_digits(value):
    digits = -int(np.floor(np.log10(value))) + 2
    return f"{round(value, digits):,.{max(digits, 0)}f}"


def rows_of(page):
    table = page.sections[0].blocks[0]
    return {row[0]: dict(zip(table.header, row, strict=True)) for row in table.rows}


def test_the_numbers_of_a_target_are_those_of_the_files(page, files) -> None:
    capacity, rows = named(files, "capacity"), rows_of(page)
    best, base = capacity["flash-bk"], capacity["standard"]

    assert f"microbatches of {best['capacity']['safe_batch_size']} at " in page.headline[0]
    assert f" {three_digits(speed(best))} tokens/s" in page.headline[0]
    assert f" {speed(best) / speed(base):.2f} times the speed of plain" in page.headline[0]
    assert list(rows) == ["flash-bk", "opacus-ghost"]  # the best first
    for method, row in rows.items():
        assert row["microbatch"] == str(capacity[method]["capacity"]["safe_batch_size"])
        assert row["tokens/s"] == three_digits(speed(capacity[method]))


def test_the_numbers_that_were_measured_are_those_of_the_files(page, files) -> None:
    # Of batches of 2 and of 3 the same is known; the larger has more tokens.
    steps, peaks = here(files, batch=3)
    ratio = {m: median(s) / median(steps["standard"]) for m, s in steps.items()}
    low = min(steps["opacus-ghost"]) / max(steps["standard"])
    high = max(steps["opacus-ghost"]) / min(steps["standard"])
    least = min(peaks, key=peaks.get)

    for said in (
        f"takes {ratio['opacus-ghost']:.2f} times as long with opacus-ghost",
        f"(95 % interval {low:.2f} to {high:.2f})",
        f"the other 2 take {ratio['opacus-hooks']:.2f} to {ratio['flash-bk']:.2f} times",
        f"{least} has the lowest peak, {peaks[least] / peaks['standard']:.2f} times plain",
        f"at {ratio[least]:.2f} times the time",
    ):
        assert said in page.headline[1]


def test_the_noise_floor_is_within_what_processes_differ_by(page, files) -> None:
    """It is one of resampled differences: at most twice the widest of any two processes."""
    steps = [list(here(files, batch)[0].values()) for batch in (2, 3)]
    widest = max(max(s) / min(s) - 1 for methods in steps for s in methods)
    told = re.search(r"within (\d+) %(?: to (\d+) %)? in 95 %", trust_of(page)).groups()

    for floor in filter(None, told):
        assert 0 <= float(floor) / 100 <= 2 * widest + 0.005


def test_the_hours_and_the_price_of_a_budget_are_those_of_its_steps(tmp_path) -> None:
    runs, options = SWEEPS["a budget"]
    page = page_of(tmp_path, *runs, **options)
    row = rows_of(page)["flash-bk"]
    # 100 steps of 64 samples: eight batches of 8 without noise and optimizer, and those once.
    hours = 100 * (8 * 0.8 + 0.2) * 1.25 / 3600

    for said in (
        f" {hours:.3f} GPU hours",
        f"(90 % interval {hours / 1.1:.3f} to {hours * 1.1:.3f})",
        f"cost {2 * hours:.3f}, 1.25 times",
    ):
        assert said in page.headline[0]
    assert (row["GPU hours"], row["price"]) == (f"{hours:.3f}", f"{2 * hours:.3f}")
    assert row["hours / non-private"] == "1.25"


def test_steps_are_those_of_one_plan_only(tmp_path) -> None:
    noise = {length: make_noise(length) for length in (8.0, 16.0)}
    noise[16.0] = make_noise(16.0, batch_size=128)
    runs = [fits("flash-bk", 1.0, seq_len=length) for length in (8, 16)]
    tables = tables_of_runs(tmp_path, *runs, planned=Planned(PRIVACY, noise))
    caption = build_document(tables, []).sections[0].blocks[0].caption

    assert "tokens at epsilon 8 (delta 1e-06, 100,000 samples). All rows:" in caption
    assert "steps of" not in caption


def test_bounds_and_noise_do_not_tell_capacities_apart(tmp_path) -> None:
    planned = Planned(PRIVACY, {4.0: make_noise(4.0)})
    settings = {"max_grad_norm": 1.0}, {"max_grad_norm": 0.1}, {"noise_multiplier": 0.5}
    runs = [fits("flash-bk", 1.0, **setting) for setting in settings]
    tables = tables_of_runs(tmp_path, *runs, planned=planned)

    assert len(tables["advice"]) == len(list_trainings(tables)) == 1
    draw_budget(tables)


def test_rows_that_are_cut_off_are_counted(tmp_path) -> None:
    runs = [fits("flash-bk", 1.0, seq_len=length) for length in range(4, 30)]
    table = page_of(tmp_path, *runs).sections[0].blocks[0]

    assert len(table.rows) == 24
    assert "These are 24 of 26 rows; advice.csv has all." in table.caption


@pytest.mark.parametrize(
    ("ranks", "named"),
    [
        ((None, FSDP, FSDP_4), ["2 x h200", "4 x h200", "h200"]),
        ((FSDP, DDP), ["2 x h200", "2 x h200 (ddp)"]),
    ],
)
def test_the_page_in_a_browser_has_every_number_of_gpus(ranks, named, tmp_path) -> None:
    tables = tables_of_runs(tmp_path, *(fits("flash-bk", 1.0, parallel=one) for one in ranks))

    assert sorted(list_trainings(tables)["gpus"]) == named
    if None in ranks:
        assert find_trainings(tables)[0]["ranks"].tolist() == [1]


def test_no_two_trainings_have_one_name(tmp_path) -> None:
    runs, _ = SWEEPS["several settings"]
    tables = tables_of_runs(tmp_path, *runs)
    training = find_trainings(tables)[0].assign(model="hf:m", lora="rank=4")
    adapted = [
        training.assign(quantization=None),
        training.assign(quantization="nf4"),
        training.assign(quantization="nf4", lora="rank=8"),
    ]
    names = list_trainings(tables)["training"]

    assert name_trainings(adapted) == [
        "m with LoRA",
        "m with LoRA over nf4 (rank=4)",
        "m with LoRA over nf4 (rank=8)",
    ]
    assert names.nunique() == len(names) == len(runs)


def test_pictures_are_shown_once_and_tables_in_the_appendix(page) -> None:
    shown = [
        [block for section in sections for block in section.blocks]
        for sections in (page.sections, page.appendix)
    ]
    pictures = [block.name for block in itertools.chain(*shown) if isinstance(block, Picture)]

    assert sorted(pictures) == ["predicted", "tradeoff"]
    assert sum(isinstance(block, Table) for block in shown[0]) == 1
    assert any(isinstance(block, Table) for block in shown[1])


def test_large_counts_are_words() -> None:
    assert [spell_large(one) for one in (2e9, 1.5e6, 51_200, 2_000_000_001)] == [
        "2 billion",
        "1.5 million",
        "51,200",
        "2,000,000,001",
    ]


@pytest.mark.parametrize(("batch", "is_told"), [(16, True), (60, False)])
def test_correlated_noise_is_told_of_where_it_saves_a_tenth_of_the_hours(
    tmp_path, batch, is_told
) -> None:
    noise = NoiseOfMechanism(
        mechanism="banded-8", noise_multiplier=0.6, batch_size=batch, batch_noise_multiplier=0.5
    )
    planned = Planned(PRIVACY, {4.0: make_noise(4.0)}, mechanisms={(4.0, 0.0, "banded-8"): noise})
    strategies = "independent", "banded-8", "banded-16"
    runs = [fits("flash-bk", 1.0, noise_strategy=strategy) for strategy in strategies]
    tables = tables_of_runs(tmp_path, *runs, planned=planned)

    costs = tables["budget"].set_index("noise_strategy")
    # A batch of 8 takes 0.8 s, and its update 0.2 s.
    hours = 100 * (batch / 8 * 0.8 + 0.2) / 3600
    assert costs.loc["banded-8", "gpu_hours"] == pytest.approx(hours)
    assert costs.loc["banded-8", "noise_multiplier"] == 0.5
    assert costs.loc["banded-16", "message"] == "its noise is not known"
    told = [line for line in build_document(tables, []).headline if "banded-8, flash-bk" in line]
    assert len(told) == is_told
    if is_told:
        assert "With noise_strategy banded-8, flash-bk takes 0.27 times the GPU hours" in told[0]
