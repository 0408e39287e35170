"""Every figure, on tables that are full, thin, hostile or empty."""

from itertools import pairwise

import pandas as pd
import pytest
from drawing import FIGURES, GROWTH, METHODS, draw, tables_of
from factory import make_experiment, tables_of_runs
from matplotlib.backends.backend_agg import FigureCanvasAgg

from dpprof.experiments.config import registry
from dpprof.experiments.records.terms import OUTCOMES, PHASES
from dpprof.results.figures.panels import split
from dpprof.results.figures.style import (
    OUTCOME_COLOURS,
    PHASE_COLOURS,
    NothingToDrawError,
    new_figure,
    spell_tick,
)


@pytest.mark.parametrize("name", FIGURES)
def test_no_text_is_clipped_and_no_panel_empty(name, drawn) -> None:
    figure = drawn(name)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    width, height = canvas.get_width_height()

    shown = [axis for axis in figure.axes if axis.axison]
    assert shown
    for axis in shown:
        assert axis.lines or axis.patches or axis.containers
    texts = [text for axis in shown for text in (axis.title, axis._right_title, *axis.texts)]
    texts += [text for legend in figure.legends for text in legend.get_texts()]
    assert figure.legends or name in DIRECT
    for text in filter(lambda text: text.get_text(), texts):
        box = text.get_window_extent(renderer)
        inside = box.x0 >= -1 and box.y0 >= -1 and box.x1 <= width + 1 and box.y1 <= height + 1
        assert inside, text.get_text()


DIRECT = ("tradeoff", "batch-size", "seq-len", "cost", "budget", "ranks", "agreement")
"""Figures whose methods are named beside points, lines and bars."""

AXES = {
    # What the panels say along x and y, in turn: a quantity with its unit, or what is ticked.
    "batch-size": [("batch size", "peak (MiB)"), ("batch size", "step time (ms)")],
    "agreement": [("peak memory (MiB)", METHODS), ("step time (ms)", ("", ""))],
    "ranks": [*[("GPUs", "tokens/s of all GPUs")] * 2, *[("GPUs", "GPU hours per 10⁹ tokens")] * 2],
    "budget": [("epsilon", "GPU hours")],
    "cost": [
        ("sequence length (tokens)", "MFLOP per token"),
        ("sequence length (tokens)", "MiB moved per token"),
        ("sequence length (tokens)", "time per token (µs)"),
    ],
    "kernels": [("time of a traced step (ms)", METHODS)],
    # The axes are shared: the left one says what is along y.
    "roofline": [("FLOPs per byte", "GFLOP/s"), ("FLOPs per byte", ())],
    "throughput": [("tokens/s", METHODS), ("% of the peak", ("", ""))],
    "breakdown": [("live memory at the peak (MiB)", METHODS)],
    "outcomes": [("runs", METHODS)],
    "phases": [("time of a step (ms)", METHODS)],
    "predicted": [("predicted peak (GiB)", METHODS)],
    "seq-len": [
        ("sequence length (tokens)", "peak (MiB)"),
        ("sequence length (tokens)", "step time (ms)"),
    ],
    # The right panel is on the left one's scale.
    "timeline": [("operators run", "live memory (KiB)"), ("operators run", ())],
    "tradeoff": [("step time (times standard)", "peak allocated (times standard)")],
}


@pytest.mark.parametrize("name", FIGURES)
def test_every_axis_says_its_quantity_and_unit_and_the_figure_a_sentence(name, drawn) -> None:
    shown = [axis for axis in drawn(name).axes if axis.axison]
    told = [
        tuple(
            side.get_label_text() or tuple(tick.get_text() for tick in side.get_ticklabels())
            for side in (axis.xaxis, axis.yaxis)
        )
        for axis in shown
    ]

    assert told == AXES[name] * (len(shown) // len(AXES[name]))
    assert drawn(name).get_label().endswith("." if name != "outcomes" else "")


@pytest.mark.parametrize("name", FIGURES)
def test_the_first_line_is_a_caption_and_the_module_asks_a_question(name) -> None:
    function = registry.load("figures", name)

    assert function.__doc__.splitlines()[0].endswith(".")
    module = __import__(function.__module__, fromlist=["x"])
    assert module.__doc__.strip().endswith("?")


@pytest.mark.parametrize("name", FIGURES)
def test_only_failures_leave_nothing_to_draw(name, crashed, full) -> None:
    empty = {stem: table.head(0) for stem, table in full.items()}
    for tables in [empty] if name == "outcomes" else [empty, crashed]:
        with pytest.raises(NothingToDrawError, match=r"no "):
            draw(name, tables)


def test_failures_are_counted_by_the_figure_of_outcomes(crashed) -> None:
    axis = draw("outcomes", crashed).axes[0]

    assert [patch.get_width() for patch in axis.patches] == [26, 26]


COMPARED = {"tradeoff": "no two methods", "throughput": "no two methods"}
"""Figures in which one method would be alone."""


def test_one_method_once_is_enough(tmp_path) -> None:
    tables = tables_of(tmp_path, methods=["opacus-ghost"], batch_sizes=[2], seq_lens=[4])

    for name in sorted(set(FIGURES) - GROWTH - COMPARED.keys()):
        assert draw(name, tables).axes, name
    for name, why in COMPARED.items():
        with pytest.raises(NothingToDrawError, match=why):
            draw(name, tables)


def test_a_tick_separates_thousands_and_counts_no_zeros() -> None:
    assert [spell_tick(one) for one in (1e6, 1234.5, 0.3, 0.1 + 0.2)] == [
        "1,000,000",
        "1,234.5",
        "0.3",
        "0.3",
    ]


@pytest.mark.parametrize(
    ("name", "axis"), [("batch-size", "batch_size"), ("seq-len", "seq_len"), ("cost", "seq_len")]
)
def test_growth_needs_two_sizes(name, axis, of_one_size) -> None:
    with pytest.raises(NothingToDrawError, match=axis):
        draw(name, of_one_size)


@pytest.mark.parametrize("name", ["tradeoff", "batch-size", "seq-len"])
def test_unknown_times_are_left_out(name, full) -> None:
    experiments = full["experiments"].assign(median_step_s=float("nan"))

    with pytest.raises(NothingToDrawError):
        draw(name, full | {"experiments": experiments})


def test_phases_are_stacked_and_compared_with_standard(drawn) -> None:
    axis = drawn("phases").axes[0]

    *parts, errors = axis.containers
    assert [part.patches[0].get_width() for part in parts] == pytest.approx([10.0, 20.0, 1.0])
    assert not any(len(one) for one in errors.lines[2][0].get_segments())
    assert [text.get_text() for text in axis.texts] == ["1.00x", "1.00x"]


def test_an_error_bar_spans_the_sums_of_several_processes(tmp_path) -> None:
    several, once = (make_experiment(method=method) for method in METHODS)
    # Sums of 31, 36 and 35 ms; the medians of the phases sum to 11 + 24 ms.
    phases_ms = [(several, 10, 21), (several, 12, 24), (several, 11, 24), (once, 20, 40)]
    runs = [
        (one, "phases", {"replicate": number % 3, "phases_s": {"forward": [a], "backward": [b]}})
        for number, (one, *ms) in enumerate(phases_ms)
        for a, b in [(length / 1e3 for length in ms)]
    ]
    (axis,) = draw("phases", tables_of_runs(tmp_path, *runs)).axes

    *parts, errors = axis.containers
    assert [part.patches[0].get_width() for part in parts] == pytest.approx([11.0, 24.0])
    assert errors.lines[2][0].get_segments()[0].flatten() == pytest.approx([31.0, 0.0, 36.0, 0.0])
    # What is written stands clear of whichever is longer, and behind a bar that has no error.
    assert [text.xy for text in axis.texts] == [pytest.approx((36.0, 0)), pytest.approx((60.0, 1))]


def test_every_phase_and_outcome_has_a_colour_of_its_own() -> None:
    for colours, terms in ((PHASE_COLOURS, PHASES[1:]), (OUTCOME_COLOURS, OUTCOMES)):
        assert list(colours) == list(terms)
        assert len(set(colours.values())) == len(colours)


def test_titles_name_what_differs_within_a_model_and_its_dtype() -> None:
    plain = {"model": "m", "parameters_total": 10, "lora": None}
    adapted = {"model": "n", "dtype": "bfloat16", "checkpointing": "reentrant"}
    rows = [
        plain,
        plain | {"optimizer": "sgd"},
        plain | adapted | {"lora": "rank 4"},
        plain | adapted,
    ]
    panels = split(pd.DataFrame([make_experiment().model_dump() | row for row in rows]), "nothing")

    assert sorted(panel.title for panel in panels.shown) == [
        "m, T = 4, B = 2, dtype = float32, optimizer = adamw",
        "m, T = 4, B = 2, dtype = float32, optimizer = sgd",
        "n with LoRA, T = 4, B = 2, dtype = bfloat16, optimizer = adamw",
        "n, T = 4, B = 2, dtype = bfloat16, optimizer = adamw",
    ]


def test_of_too_many_settings_the_largest_are_shown() -> None:
    known = {"model": "m", "parameters_total": 10}
    rows = [make_experiment(seq_len=length).model_dump() | known for length in range(1, 31)]
    panels = split(pd.DataFrame(rows), "nothing")

    assert [panel.title for panel in panels.shown] == [f"m, T = {n}, B = 2" for n in range(19, 31)]
    assert panels.beyond == 18
    figure, _ = panels.lay_out()
    assert figure.get_suptitle() == "18 more panels are left out; the tables have all"


@pytest.mark.parametrize("width", [1.2, 1.6, 3.4])
def test_labels_of_ticks_do_not_meet(width) -> None:
    """Long ones leave room for few."""
    figure, axes = new_figure(width_inches=width)
    axes[0, 0].set_xlim(0, 390_000)
    figure.draw_without_rendering()
    boxes = [label.get_window_extent() for label in axes[0, 0].get_xticklabels()]
    shown = [box for box in boxes if axes[0, 0].bbox.x0 <= (box.x0 + box.x1) / 2 <= figure.bbox.x1]

    assert len(shown) >= 1
    assert all(one.x1 < other.x0 for one, other in pairwise(shown))
