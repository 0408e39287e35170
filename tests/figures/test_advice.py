"""The figure of several sequence lengths: its lines are the predictions, and each has its name."""

import pytest

from dpprof.experiments.records.advice import Advice, Option
from dpprof.results.analysis.standings import DAGGER
from dpprof.results.figures.advice import draw

LENGTHS = (512, 1024, 2048, 4096)


def option(method: str, speed: float | None, verdict: str) -> Option:
    fits = {"safe_batch_size": 8, "tokens_per_s": speed}
    fits |= {"tokens_per_s_low": 0.5 * speed, "tokens_per_s_high": 2 * speed} if speed else {}
    return Option(
        method=method, verdict=verdict, private=method != "standard", **fits if speed else {}
    )


def make(length: int, speeds: dict[str, float | None], **others) -> Advice:
    """Invent advice; a method without a speed does not fit."""
    options = [option(m, s, "slower" if s else "does not fit") for m, s in speeds.items()]
    named = {"model": "hf-m", "dtype": "float32", "target": "h100", "budget_bytes": None}
    told = {"sure_of_memory": "", "sure_of_time": ""}
    return Advice(seq_len=length, options=options, **named | told | others)


SPEEDS = {
    "standard": [900.0, 800.0, 700.0, 600.0],
    "flash-bk": [450.0, 400.0, 350.0, None],
    "opacus-ghost": [300.0, None, None, None],
    "opacus-hooks": [None, None, None, None],
}


def rows(**others) -> list[Advice]:
    return [
        make(length, {method: speeds[at] for method, speeds in SPEEDS.items()}, **others)
        for at, length in enumerate(LENGTHS)
    ]


def lines_of(axis) -> dict[str, tuple[list[float], list[float]]]:
    named = (line for line in axis.lines if line.get_marker() != "x")
    return {one.get_label(): (list(one.get_xdata()), list(one.get_ydata())) for one in named}


def test_each_line_has_the_predictions_and_ends_where_its_method_stops_fitting() -> None:
    figure = draw(rows()[::-1], {})  # in any order
    [axis] = figure.axes

    assert lines_of(axis) == {
        "standard": (list(LENGTHS), SPEEDS["standard"]),
        "flash-bk": ([512, 1024, 2048], [450, 400, 350]),
        "opacus-ghost": ([512], [300]),
    }
    crosses = [line for line in axis.lines if line.get_marker() == "x"]
    ends = [(*line.get_xdata(), *line.get_ydata()) for line in crosses]
    assert ends == [(2048, 350), (512, 300)]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "no safe batch at the next length"
    ]
    reaches = [
        (part[0][1], part[1][1]) for bars in axis.collections for part in bars.get_segments()
    ]
    assert (450, 1800) in reaches
    assert axis.get_xscale() == "log"
    assert [label.get_text() for label in axis.get_xticklabels()] == [
        f"{length:,}" for length in LENGTHS
    ]
    assert "no safe batch at any length: opacus-hooks" in axis.get_xlabel()


def test_names_stand_beside_the_ends_and_bear_signs() -> None:
    figure = draw(rows(), {DAGGER: ["flash-bk"]})
    figure.draw_without_rendering()
    [axis] = figure.axes
    texts = {text.get_text(): text for text in axis.texts}

    assert set(texts) == {"standard", f"flash-bk {DAGGER}", "opacus-ghost"}
    for name, (at, speeds) in lines_of(axis).items():
        [text] = [one for said, one in texts.items() if said.startswith(name)]
        box = text.get_window_extent()
        end = axis.transData.transform((at[-1], speeds[-1]))
        assert 0 < box.x0 - end[0] < 0.2 * axis.bbox.width
        assert box.y0 < end[1] < box.y1


def test_each_dtype_has_a_panel_and_so_has_training_without_adapters() -> None:
    whole = [one for one in rows(dtype="bfloat16") if one.seq_len < 4096]
    adapted = [
        make(one.seq_len, {"flash": 5.0}, dtype="bfloat16", lora="rank 8", whole=one)
        for one in whole
    ]
    figure = draw([*rows(), *adapted], {})

    assert [axis.get_title() for axis in figure.axes if axis.get_title()] == [
        "hf-m, float32 on h100",
        "hf-m with LoRA, bfloat16 on h100",
        "hf-m, bfloat16 on h100",
    ]
    assert lines_of(figure.axes[1]) == {"flash": ([512, 1024, 2048], [5, 5, 5])}


@pytest.mark.parametrize("speeds", [{"flash": None}, {}])
def test_without_a_predicted_time_the_figure_says_so(speeds) -> None:
    [axis] = draw([make(8, speeds), make(16, speeds)], {}).axes

    assert [text.get_text() for text in axis.texts] == [
        "Nothing to draw: no time is predicted for any safe batch."
    ]
