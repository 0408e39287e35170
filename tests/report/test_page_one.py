"""Page one: every number recomputed from the JSON files by other code, for sweeps of every kind."""

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

from dpprof.experiments.config.registry import PREDICTIONS
from dpprof.results.analysis.advice.budget import Planned
from dpprof.results.analysis.collection import collect
from dpprof.results.analysis.selection import find_trainings
from dpprof.results.analysis.tables.build import build_tables
from dpprof.results.figures.budget import draw as draw_budget
from dpprof.results.report.content import build_document
from dpprof.results.report.page.data import list_trainings
from dpprof.results.report.rendering.document import Bullets, Drawing, Picture, Table
from dpprof.results.report.wording import name_trainings, spell_large

SETTINGS = ((8, "float32"), (16, "float32"), (16, "bfloat16"))
METHODS = ("standard", "opacus-ghost", "opacus-hooks", "flash-bk")
GIB = 2**30
STEP_S = {"standard": 1.0, "opacus-ghost": 1.9, "flash-bk": 1.15}
SAFE = {"standard": 35, "opacus-ghost": 20, "flash-bk": 34}
NEEDS = {"standard": 21, "opacus-ghost": 30, "flash-bk": 24}
DRAWN = [Drawing(name=name, caption=f"{name}.", missing=None) for name in ("tradeoff", "predicted")]


def write_sweep(root):
    """Times and peaks of four methods here, capacities on an H200, peaks on an H100."""
    draw = np.random.default_rng(7)
    runs = []
    for rank, method in enumerate(METHODS):
        for batch, number in itertools.product((2, 3), range(3)):
            known = {
                "replicate": number,
                "step_s": tuple(draw.normal(0.01 * batch * (1 + rank), 1e-4, 5)),
                "peak_allocated_bytes": 2**20 * batch * (5 - rank if rank else 4),
            }
            runs.append((make_experiment(method=method, batch_size=batch), "clean", known))
    for method, step_s in STEP_S.items():
        on_h200 = make_experiment(
            method=method, model="1b", seq_len=1024, batch_size=1, device="cuda", target="h200"
        )
        sizes = {"safe_batch_size": SAFE[method], "stated_batch_size": SAFE[method]}
        found = make_capacity(step_s, **sizes)
        found["compute"] |= {"dp_flop_multiplier": 1 + step_s / 10}
        runs.append((on_h200, "capacity", {"recorded": found}))
        on_h100 = make_experiment(
            method=method, model="tiny", seq_len=32, batch_size=8, device="cuda", target="h100"
        )
        memory = make_memory({"parameters": NEEDS[method] * GIB})
        runs.append((on_h100, "estimate", {"recorded": memory}))
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


def test_the_question_names_what_is_trained_and_where(page) -> None:
    assert page.question == "How should one train 1b privately on h200?"


def test_the_answer_is_of_targets_first(page, files) -> None:
    found = named(files, "capacity")
    best, base = found["flash-bk"], found["standard"]

    assert page.headline[0] == (
        "For 1b use flash-bk on h200, in microbatches of "
        f"{best['capacity']['safe_batch_size']} at "
        f"{three_digits(speed(best))} tokens/s, {speed(best) / speed(base):.2f} times the speed of "
        "plain training."
    )


def test_the_second_sentence_is_what_was_measured(page, files) -> None:
    # Of batches of 2 and of 3 the same is known; the larger has more tokens.
    steps, peaks = here(files, batch=3)
    ratio = {m: median(s) / median(steps["standard"]) for m, s in steps.items()}
    low = min(steps["opacus-ghost"]) / max(steps["standard"])
    high = max(steps["opacus-ghost"]) / min(steps["standard"])
    least = min(peaks, key=peaks.get)

    assert least == "flash-bk"
    assert page.headline[1] == (
        f"On this machine, a step of V16-d8-L1-H2 (T = 4, B = 3) takes "
        f"{ratio['opacus-ghost']:.2f} times as long with opacus-ghost as without privacy (95 % "
        f"interval {low:.2f} to {high:.2f}), at the same peak memory; the other 2 take "
        f"{ratio['opacus-hooks']:.2f} to {ratio['flash-bk']:.2f} times, and flash-bk has the "
        f"lowest peak, {peaks[least] / peaks['standard']:.2f} times plain training's, at "
        f"{ratio['flash-bk']:.2f} times the time. It is the fastest private method in all 2 "
        "settings measured."
    )


def test_a_target_with_peaks_alone_has_its_sentence_and_its_table(tmp_path) -> None:
    runs = [
        (
            make_experiment(
                method=method, model="tiny", seq_len=32, batch_size=8, device="cuda", target="h100"
            ),
            "estimate",
            {"recorded": make_memory({"parameters": size * GIB})},
        )
        for method, size in NEEDS.items()
    ]
    page = page_of(tmp_path, *runs)

    assert page.headline == (
        (
            "On h100, tiny (T = 32, B = 8) is predicted to peak at 24.0 GiB with flash-bk, 1.14 "
            "times plain training, and at 30.0 GiB with opacus-ghost."
        ),
    )
    table = page.sections[0].blocks[0]
    assert table.header == ("method", "peak (GiB)", "x standard")
    assert ("flash-bk", "24.0", "1.14") in table.rows
    assert table.caption.endswith("All rows: tiny (T = 32, B = 8), h100, fits.")


def test_the_table_has_a_row_a_method_with_the_numbers_of_the_files(page, files) -> None:
    table = page.sections[0].blocks[0]
    assert isinstance(table, Table)
    rows = {row[0]: dict(zip(table.header, row, strict=True)) for row in table.rows}
    capacity = named(files, "capacity")

    assert list(rows) == ["flash-bk", "opacus-ghost"]  # the best first
    for method, row in rows.items():
        assert row["microbatch"] == str(capacity[method]["capacity"]["safe_batch_size"])
        assert row["tokens/s"] == three_digits(speed(capacity[method]))
    assert "price" not in table.header
    assert (
        "All rows: 1b, T = 1,024, computed in float32, h200, gradients verified." in table.caption
    )


def test_without_a_target_the_table_is_of_what_was_measured(tmp_path) -> None:
    times = {"standard": 0.01, "flash-bk": 0.012, "opacus-ghost": 0.03}
    page = page_of(tmp_path, *(takes(m, s, peak_allocated_bytes=2**20) for m, s in times.items()))
    table = page.sections[0].blocks[0]

    assert table.header == ("method", "time over standard", "peak over standard", "verified")
    assert table.rows == (
        ("standard", "1.00", "1.00", "yes"),
        ("flash-bk", "1.20", "1.00", "yes"),
        ("opacus-ghost", "3.00", "1.00", "yes"),
    )


def test_a_budget_is_priced_in_the_answer_and_the_table(tmp_path) -> None:
    runs = [fits("standard", 1.0), fits("flash-bk", 1.25)]
    planned = Planned(PRIVACY, {4.0: make_noise(4.0)})
    page = build_document(tables_of_runs(tmp_path, *runs, planned=planned), [])
    table = page.sections[0].blocks[0]
    rows = {row[0]: dict(zip(table.header, row, strict=True)) for row in table.rows}
    # 100 steps of 64 samples: eight batches of 8 without noise and optimizer, and those once.
    hours = {name: 100 * (8 * 0.8 + 0.2) * s / 3600 for name, s in (("p", 1.0), ("f", 1.25))}

    assert page.question == (
        "With which method should one train V16-d8-L1-H2 on h200, and at what price for "
        "51,200 tokens at epsilon 8, if an hour of any GPU costs 2?"
    )
    assert page.headline == (
        (
            "For V16-d8-L1-H2 use flash-bk on h200, in microbatches of 8: a predicted "
            f"{hours['f']:.3f} GPU hours (90 % interval {hours['f'] / 1.1:.3f} to "
            f"{hours['f'] * 1.1:.3f}) that cost {2 * hours['f']:.3f}, 1.25 times as much as "
            "without privacy."
        ),
    )
    assert rows["flash-bk"]["GPU hours"] == f"{hours['f']:.3f}"
    assert rows["flash-bk"]["price"] == f"{2 * hours['f']:.3f}"
    assert (rows.keys(), rows["flash-bk"]["hours / non-private"]) == ({"flash-bk"}, "1.25")
    assert "in 100 steps of 64 samples" in table.caption


@pytest.mark.parametrize(
    ("step_s", "ending"), [(1.15, "; h100 may be as cheap."), (1.25, " that cost 0.367.")]
)
def test_other_gpus_are_named_whose_price_may_be_as_low(tmp_path, step_s, ending) -> None:
    """Intervals reach a tenth to each side."""
    runs = [fits("flash-bk", 1.0), fits("flash-bk", step_s, "h100"), fits("flash", 1.3, "h100")]
    planned = Planned(PRIVACY, {4.0: make_noise(4.0)})
    (said,) = build_document(tables_of_runs(tmp_path, *runs, planned=planned), []).headline

    assert said.startswith("For V16-d8-L1-H2 use flash-bk on h200")
    assert said.endswith(ending)


def test_many_gpus_that_may_be_as_cheap_are_counted(tmp_path) -> None:
    others = ("h100", "b200", "l40s", "a10g")
    runs = [fits("flash-bk", 1.0), *(fits("flash-bk", 1.1, target) for target in others)]
    planned = Planned(PRIVACY, {4.0: make_noise(4.0)})
    (said,) = build_document(tables_of_runs(tmp_path, *runs, planned=planned), []).headline

    assert said.endswith("; 4 others may be as cheap.")


def test_the_fewest_hours_come_first(tmp_path) -> None:
    runs = [fits("flash", 2.0), fits("flash-bk", 3.0)]
    planned = Planned(PRIVACY, {4.0: make_noise(4.0)})
    tables = tables_of_runs(tmp_path, *runs, planned=planned)
    costs = tables["budget"]
    costs["gpu_hours"] = costs["method"].map({"flash": 9.0, "flash-bk": 4.0})  # noise costs time
    table = build_document(tables, []).sections[0].blocks[0]

    shown = [table.header.index(name) for name in ("method", "GPU hours")]
    assert [[row[at] for at in shown] for row in table.rows] == [
        ["flash-bk", "4.00"],
        ["flash", "9.00"],
    ]
    assert "tokens/s" not in table.header


def test_steps_are_those_of_one_plan_only(tmp_path) -> None:
    noise = {length: make_noise(length) for length in (8.0, 16.0)}
    noise[16.0] = make_noise(16.0, batch_size=128)
    runs = [fits("flash-bk", 1.0, seq_len=length) for length in (8, 16)]
    tables = tables_of_runs(tmp_path, *runs, planned=Planned(PRIVACY, noise))
    caption = build_document(tables, []).sections[0].blocks[0].caption

    assert "tokens at epsilon 8 (delta 1e-06, 100,000 samples). All rows:" in caption
    assert "steps of" not in caption


def test_a_caption_speaks_of_the_columns_that_are_there(tmp_path) -> None:
    planned = Planned(PRIVACY, {4.0: make_noise(4.0)})
    runs = [fits(method, None) for method in ("standard", "flash-bk")]
    tables = tables_of_runs(tmp_path, *runs, planned=planned)
    table = build_document(tables, []).sections[0].blocks[0]

    assert set(table.header) <= {"method", "microbatch"}
    assert not any(word in table.caption for word in ("Hours", "hours", "price", "plain", "dash"))


def test_bounds_and_noise_do_not_tell_capacities_apart(tmp_path) -> None:
    planned = Planned(PRIVACY, {4.0: make_noise(4.0)})
    runs = [
        fits("flash-bk", 1.0, **{name: value})
        for name, values in (("max_grad_norm", (1.0, 0.1)), ("noise_multiplier", (0.5,)))
        for value in values
    ]
    tables = tables_of_runs(tmp_path, *runs, planned=planned)

    assert len(tables["advice"]) == len(list_trainings(tables)) == 1
    draw_budget(tables)


def test_speeds_are_compared_among_ranks_of_one_kind(tmp_path) -> None:
    ddp, fsdp = ({"kind": kind, "world_size": 2} for kind in ("ddp", "fsdp"))
    runs = [
        fits(method, step_s, parallel=ranks)
        for ranks, method, step_s in (
            *((fsdp, "flash-bk", 1.3), (fsdp, "standard", 1.2)),
            *((ddp, "flash-bk", 1.0), (ddp, "standard", 0.5)),
        )
    ]
    tables = tables_of_runs(tmp_path, *runs)

    assert (
        build_document(tables, [])
        .headline[0]
        .endswith(
            "on 2 x h200 (ddp), in microbatches of 8 at 64.0 tokens/s, 0.50 times the speed of "
            "plain training."
        )
    )
    assert sorted(set(list_trainings(tables)["gpus"])) == ["2 x h200", "2 x h200 (ddp)"]


def test_no_method_is_said_to_be_as_fast_as_itself(tmp_path) -> None:
    slow_update, other = fits("flash-bk", 1.05), fits("opacus-ghost", 1.0)
    planned = Planned(PRIVACY, {4.0: make_noise(4.0)})
    for (_, _, kept), update_s in ((slow_update, 0.9), (other, 0.05)):
        step = kept["recorded"]["time"]["predicted_step_s"]
        step["without_update"] = step["median"] - update_s
    page = build_document(tables_of_runs(tmp_path, slow_update, other, planned=planned), [])

    assert "For V16-d8-L1-H2 use flash-bk" in page.headline[0]
    assert "may be as fast" not in page.headline[0]


def test_without_a_budget_nothing_is_said_of_hours(tmp_path) -> None:
    table = page_of(tmp_path, fits("flash-bk", 1.0)).sections[0].blocks[0]

    assert "plain" not in table.caption


def test_rows_that_are_cut_off_are_counted(tmp_path) -> None:
    runs = [fits("flash-bk", 1.0, seq_len=length) for length in range(4, 30)]
    table = page_of(tmp_path, *runs).sections[0].blocks[0]

    assert len(table.rows) == 24
    assert "These are 24 of 26 rows; advice.csv has all." in table.caption


def test_the_page_in_a_browser_has_every_number_of_gpus(tmp_path) -> None:
    ranks = [None, *({"kind": "fsdp", "world_size": size} for size in (2, 4))]
    tables = tables_of_runs(tmp_path, *(fits("flash-bk", 1.0, parallel=one) for one in ranks))

    assert sorted(list_trainings(tables)["gpus"]) == ["2 x h200", "4 x h200", "h200"]
    assert find_trainings(tables)[0]["ranks"].tolist() == [1]


def test_trainings_that_differ_in_a_setting_say_so(tmp_path) -> None:
    ways = ("none", "reentrant")
    page = page_of(tmp_path, *(fits("flash-bk", 1.0, checkpointing=way) for way in ways))
    table = page.sections[0].blocks[0]

    assert sorted(row[table.header.index("checkpointing")] for row in table.rows) == list(ways)


def test_no_two_trainings_have_one_name(tmp_path) -> None:
    foreign = {"model": "hf:m", "lora": "rank=4"}
    runs = [
        *(fits("flash-bk", 1.0, seq_len=length, dtype=dtype) for length, dtype in SETTINGS),
        *(fits("flash-bk", 1.0, checkpointing="reentrant", seq_len=length) for length in (8, 16)),
    ]
    tables = tables_of_runs(tmp_path, *runs)
    one = find_trainings(tables)[0].assign(**foreign)
    adapted = [
        one.assign(quantization=None),
        one.assign(quantization="nf4"),
        one.assign(quantization="nf4", lora="rank=8"),
    ]
    page = build_document(tables, [])

    assert name_trainings(adapted) == [
        "m with LoRA",
        "m with LoRA over nf4 (rank=4)",
        "m with LoRA over nf4 (rank=8)",
    ]
    assert page.question == "How should one train 1 model in 5 settings privately on h200?"
    assert [said.partition(" use flash-bk")[0] for said in page.headline] == [
        "For V16-d8-L1-H2 at T = 16 (float32, checkpointing none)",
        "For V16-d8-L1-H2 at T = 16 (bfloat16, checkpointing none)",
        "For V16-d8-L1-H2 at T = 16 (float32, checkpointing reentrant)",
    ]
    names = list_trainings(tables)["training"]
    assert names.nunique() == len(names) == len(runs)


def test_two_lengths_are_asked_about_and_told_by_name(tmp_path) -> None:
    page = page_of(tmp_path, *(fits("flash-bk", 1.0, seq_len=length) for length in (8, 16)))

    named = [f"V16-d8-L1-H2 at T = {length}" for length in (16, 8)]
    assert page.question == f"How should one train {' or '.join(named)} privately on h200?"
    assert [said.partition(" use flash-bk")[0] for said in page.headline] == [
        f"For {name}" for name in named
    ]


def test_a_training_is_told_on_the_fewest_gpus_that_fit_it(tmp_path) -> None:
    ranks = {"kind": "fsdp", "world_size": 2}
    alone, whole = (
        make_experiment(device="cuda", target="h200", parallel=p, method="flash-bk")
        for p in (None, ranks)
    )
    nothing = (alone, "capacity", {"outcome": "oom"})
    page = page_of(tmp_path, nothing, (whole, "capacity", {"recorded": make_capacity(None)}))

    assert page.headline == (
        (
            "For V16-d8-L1-H2 use flash-bk on 2 x h200, in microbatches of 8; no time is "
            "predicted there."
        ),
    )


def test_the_figure_of_the_first_page_is_not_shown_again(page) -> None:
    pictures = [
        block.name
        for section in (*page.sections, *page.appendix)
        for block in section.blocks
        if isinstance(block, Picture)
    ]

    assert page.sections[0].blocks[1].name == "tradeoff"
    assert sorted(pictures) == ["predicted", "tradeoff"]


def test_four_lines_say_whether_to_believe_it(page, files) -> None:
    (bullets,) = page.sections[1].blocks
    assert isinstance(bullets, Bullets)
    untried, proof, noise, runs = bullets.items
    steps = [list(here(files, batch)[0].values()) for batch in (2, 3)]
    # The floor is one of resampled differences: at most twice the widest of any two processes.
    widest = max(max(s) / min(s) - 1 for methods in steps for s in methods)
    told = re.search(r"within (\d+) %(?: to (\d+) %)? in 95 %", noise).groups()
    floors = [float(floor) / 100 for floor in told if floor]

    assert page.sections[1].title == "Can I believe this?"
    assert all(0 <= floor <= 2 * widest + 0.005 for floor in floors)
    assert noise.endswith(" in 95 % of cases; smaller differences may be noise.")
    assert untried == (
        "Nothing ran on h100 and h200: what is said of them is predicted. This report's own "
        "measurements are of this machine (synthetic cpu). docs/validation.md and "
        "docs/numbers/step-time.md compare predictions for GPUs with what others measured."
    )
    assert proof == (
        "The gradients of 4 of 4 methods (standard included) were verified to be right."
    )
    predicted = sum(one["instrument"] in PREDICTIONS for one in files)
    assert runs.startswith(
        f"{len(files)} results ({len(files) - predicted} measured, {predicted} predicted): "
        f"{len(files)} ok (100 %)."
    )


def test_tables_are_in_the_appendix_alone(page) -> None:
    for section in page.sections[1:]:
        assert not [block for block in section.blocks if isinstance(block, Table)]
    assert [b for section in page.appendix for b in section.blocks if isinstance(b, Table)]


def page_of(root, *runs):
    return build_document(tables_of_runs(root, *runs), [])


def fits(method, step_s, target="h200", **axes):
    """A capacity result on a GPU with a predicted step time."""
    experiment = make_experiment(method=method, device="cuda", target=target, **axes)
    return experiment, "capacity", {"recorded": make_capacity(step_s)}


def takes(method, step_s, **fields):
    """A step time that was measured here."""
    return make_experiment(method=method), "clean", {"step_s": (step_s,), **fields}


TINY = "V16-d8-L1-H2 at T = 4"
EVIL = "<b>no</b> \\input{x} $(y)"
ANSWERS = {
    "predictions alone": (
        [fits(m, s, seq_len=8, batch_size=1) for m, s in (("standard", 1.0), ("flash-bk", 1.05))],
        "How should one train V16-d8-L1-H2 privately on h200?",
        "on h200, in microbatches of 8 at 61.0 tokens/s, 0.95 times the speed of plain training.",
    ),
    "close methods": (
        [fits("opacus-ghost", 1.01), fits("flash-bk", 1.0)],
        "How should one train V16-d8-L1-H2 privately on h200?",
        "tokens/s; opacus-ghost may be as fast.",
    ),
    "no predicted time": (
        [fits("flash-bk", None)],
        "How should one train V16-d8-L1-H2 privately on h200?",
        "use flash-bk on h200, in microbatches of 8; no time is predicted there.",
    ),
    "only failures": (
        [
            (make_experiment(method="flash-bk"), "clean", {"outcome": "crashed", "message": EVIL}),
            (make_experiment(method="opacus-ghost"), "clean", {"outcome": "oom"}),
        ],
        (
            f"Which of flash-bk and opacus-ghost should train {TINY} on this machine, and at "
            f"what cost?"
        ),
        (
            "Nothing can be told: none of 2 runs succeeded (1 oom, 1 crashed). The first, "
            "flash-bk, "
            f"said: {EVIL}"
        ),
    ),
    "one experiment": (
        [takes("flash-bk", 0.0123, peak_allocated_bytes=3 * 2**20)],
        "What does flash-bk cost where it trains V16-d8-L1-H2 at T = 4 on this machine?",
        (
            "On this machine, a step of V16-d8-L1-H2 (T = 4, B = 2) takes 12.3 ms and peaks "
            "at 3.0 MiB "
            "allocated with flash-bk."
        ),
    ),
    "plain training alone": (
        [takes("standard", 0.01)],
        "What does it take to train V16-d8-L1-H2 at T = 4 on this machine without privacy?",
        "without privacy; no private method succeeded.",
    ),
}
"""The runs of a sweep, its question, and how its only sentence ends."""


@pytest.mark.parametrize("case", ANSWERS)
def test_a_small_sweep_is_asked_and_answered(case, tmp_path) -> None:
    runs, question, ending = ANSWERS[case]
    page = page_of(tmp_path, *runs)

    assert page.question == question
    (sentence,) = page.headline
    assert sentence.endswith(ending)
    titles = [section.title for section in page.sections]
    # There is no table without numbers.
    assert ("The methods side by side" in titles) == (case != "only failures")
    unmeasured = "No time was measured: what is said of times is predicted."
    trust = page.sections[-2].blocks[0].items
    assert (unmeasured in trust) == ("this machine" not in question or case == "only failures")


def test_a_method_that_failed_verification_is_not_recommended(tmp_path) -> None:
    ghost, flash = fits("opacus-ghost", 1.0), fits("flash-bk", 2.0)
    write_synthetic_verdict(tmp_path, ghost[0], passed=False, reason="wrong")
    sentence = page_of(tmp_path, ghost, flash).headline[0]

    assert sentence.startswith("For V16-d8-L1-H2 use flash-bk on h200")
    assert sentence.endswith("tokens/s; opacus-ghost\N{DAGGER} failed verification.")
    assert page_of(tmp_path, ghost).headline[0] == (
        "No private method of the sweep that computes the right gradient safely fits "
        f"{TINY} on h200; opacus-ghost\N{DAGGER} failed verification."
    )


def test_a_training_is_told_on_the_fewest_gpus_that_fit_a_right_method(tmp_path) -> None:
    ranks = {"kind": "fsdp", "world_size": 2}
    wrong, right = fits("opacus-ghost", 1.0), fits("flash-bk", 1.0, parallel=ranks)
    write_synthetic_verdict(tmp_path, wrong[0], passed=False, reason="wrong")

    said = page_of(tmp_path, wrong, right).headline[0]
    assert said.startswith(
        "For V16-d8-L1-H2 use flash-bk on 2 x h200, in microbatches of 8 at 64.0"
    )


def test_without_a_budget_the_fewest_gpu_hours_are_best(tmp_path) -> None:
    ranks = {"kind": "fsdp", "world_size": 2}
    two = make_experiment(method="flash-bk", device="cuda", target="h100", parallel=ranks)
    # 64 tokens/s of two GPUs are fewer of each than 40 of one.
    on_two = two, "capacity", {"recorded": make_capacity(1.0)}

    said = page_of(tmp_path, fits("flash-bk", 0.8), on_two).headline[0]
    assert said.startswith("For V16-d8-L1-H2 use flash-bk on h200, in microbatches of 8 at 40.0")


def test_why_no_private_method_trains_is_said(tmp_path) -> None:
    refused = make_experiment(method="flash-bk", device="cuda", target="h200")
    wrong = fits("opacus-ghost", 1.0)
    write_synthetic_verdict(tmp_path / "wrong", wrong[0], passed=False, reason="wrong")
    said = [
        page_of(tmp_path / name, *runs).headline[0]
        for name, runs in (
            ("plain", [fits("standard", 1.0)]),
            ("refused", [(refused, "capacity", {"outcome": "unsupported"})]),
            ("wrong", [wrong]),
        )
    ]
    where = f"{TINY} on h200"

    assert said[0] == f"The sweep asks about no private method for {where}."
    assert said[1] == f"Every private method of the sweep failed for {where}."
    assert said[2].startswith(
        f"No private method of the sweep that computes the right gradient safely fits {where}; "
    )


def test_no_result_at_all_is_said(tmp_path) -> None:
    tables = build_tables(collect(make_manifest((make_experiment(), 0)), tmp_path, partial=True))

    page = build_document(tables, [])

    assert page.question == ""
    assert page.headline == ("Nothing can be told yet: no planned run has a result.",)


def test_without_standard_there_are_milliseconds_and_no_ratios(tmp_path) -> None:
    times = {"flash-bk": 0.010, "opacus-ghost": 0.030, "opacus-hooks": 0.020}
    runs = [takes(m, s, peak_allocated_bytes=int(s * 1e8)) for m, s in times.items()]
    page = page_of(tmp_path, *runs)

    assert "takes 10.0 ms and peaks at 1.0 MiB allocated with flash-bk" in page.headline[0]
    assert "the other 2 take 20.0 to 30.0 ms" in page.headline[0]
    table = page.sections[0].blocks[0]
    assert table.header == ("method", "step (ms)", "peak (MiB)", "verified")
    assert table.rows[0] == ("flash-bk", "10.0", "1.0", "yes")
    assert "times standard" not in " ".join(page.headline)


def test_a_failure_beside_successes_stands_in_the_table(tmp_path) -> None:
    failed = make_experiment(method="opacus-hooks"), "clean", {"outcome": "oom"}
    page = page_of(tmp_path, takes("standard", 0.01), takes("flash-bk", 0.02), failed)
    rows = {row[0]: row for row in page.sections[0].blocks[0].rows}

    assert rows["opacus-hooks"][1:3] == ("oom", "oom")
    assert "Not ok: 1 oom; see Outcomes." in page.sections[1].blocks[0].items[-1]


def test_the_largest_model_is_the_one_that_is_told(tmp_path) -> None:
    runs = []
    for size, seconds in ((4, 0.01), (8, 0.05)):
        model = {"vocab_size": 16, "d_model": size, "layers": 1, "heads": 2}
        for method in ("standard", "flash-bk"):
            experiment = make_experiment(method=method, model=model)
            runs += [(experiment, "clean", {"step_s": (seconds,)})]
    tables = tables_of_runs(tmp_path, *runs)
    # All synthetic models have as many parameters; say that the wider one has more.
    wider = tables["experiments"]["model"].str.contains("d8")
    grown = tables["experiments"].assign(parameters_total=np.where(wider, 99, 10))

    assert "a step of V16-d8-" in build_document(tables | {"experiments": grown}, []).headline[0]


def test_an_unverified_method_bears_its_dagger_in_the_answer(tmp_path) -> None:
    experiment = make_experiment(method="opacus-ghost")
    write_synthetic_verdict(tmp_path, experiment, passed=None, reason="nobody looked")
    page = page_of(tmp_path, takes("opacus-ghost", 0.01))

    assert "with opacus-ghost\N{DAGGER}" in page.headline[0]
    assert page.sections[0].blocks[0].rows[0][-1] == "not known"


def test_large_counts_are_words() -> None:
    assert [spell_large(one) for one in (2e9, 1.5e6, 51_200, 2_000_000_001)] == [
        "2 billion",
        "1.5 million",
        "51,200",
        "2,000,000,001",
    ]
