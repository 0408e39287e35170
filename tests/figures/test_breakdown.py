import pytest
from factory import make_experiment, make_memory, tables_of_runs
from matplotlib.backends.backend_agg import FigureCanvasAgg

from dpprof.experiments.config.datasheets import L4
from dpprof.results.figures.parts import draw_breakdown, draw_predicted
from dpprof.results.figures.style import COMPONENT_COLOURS, NothingToDrawError

MIB, GIB = 2**20, 2**30
STANDARD = make_experiment(method="standard")
HOOKS = make_experiment(method="opacus-hooks")
OWNED = {"parameters": 10 * MIB, "gradients": 30 * MIB}
PRIVATE = OWNED | {"per_sample_gradients": 60 * MIB, "unattributed": 4 * MIB, "inputs": 400}


def measured(root):
    """Standard is recorded, and another process knows its peak; hooks is estimated."""
    return tables_of_runs(
        root,
        (STANDARD, "phases", {"peak_allocated_bytes": 41 * MIB}),
        (STANDARD, "memory", {"recorded": make_memory(OWNED)}),
        (HOOKS, "estimate", {"recorded": make_memory(PRIVATE)}),
    )


def widths_of(axis) -> dict[str, list[float]]:
    return {
        container.get_label(): [bar.get_width() for bar in container]
        for container in axis.containers
    }


def test_bars_are_the_owners_at_the_peak_and_the_number_is_their_ratio(tmp_path) -> None:
    (axis,) = draw_breakdown(measured(tmp_path)).axes

    assert widths_of(axis) == {
        "parameters": [10, 10],
        "gradients": [30, 30],
        "per sample gradients": [0, 60],
        "unattributed": [0, 4],
    }
    assert axis.containers[-1].patches[0].get_hatch()
    assert [label.get_text() for label in axis.get_yticklabels()] == ["standard", "opacus-hooks"]
    assert [text.get_text() for text in axis.texts] == ["1.00x", "2.60x"]


def test_a_tick_marks_the_allocators_peak_where_it_is_known(tmp_path) -> None:
    (axis,) = draw_breakdown(measured(tmp_path)).axes
    ticks = next(line for line in axis.lines if line.get_marker() == "|")

    assert list(ticks.get_xdata()) == pytest.approx([41.0, float("nan")], nan_ok=True)
    # What is written stands clear of whichever is longer.
    assert axis.texts[0].xy == (41.0, 0)


@pytest.mark.parametrize("lengths", [[4], [4, 8]])
def test_even_with_every_component_no_legend_is_cut(lengths, tmp_path) -> None:
    recorded = make_memory(dict.fromkeys(COMPONENT_COLOURS, MIB))
    method = "opacus-fast-gradient-clipping"
    experiments = [make_experiment(method=method, seq_len=length) for length in lengths]
    runs = [(experiment, "memory", {"recorded": recorded}) for experiment in experiments]
    figure = draw_breakdown(tables_of_runs(tmp_path, *runs))
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    box = figure.legends[0].get_window_extent(canvas.get_renderer())

    width, height = canvas.get_width_height()
    assert 0 <= box.x0 < box.x1 <= width
    assert 0 <= box.y0 < box.y1 <= height
    assert len(figure.legends[0].get_texts()) == 20
    for axis in figure.axes:
        assert axis.get_window_extent().height > 20


def estimate(method="standard", size=4 * GIB, **fields):
    on = {"device": "cuda", "target": "l4"}
    recorded = make_memory({"parameters": size, "noise": size})
    return make_experiment(**{"method": method, **on, **fields}), "estimate", {"recorded": recorded}


def test_bars_are_the_owners_in_gib_beside_the_targets_memory(tmp_path) -> None:
    tables = tables_of_runs(tmp_path, estimate(), estimate("opacus-hooks", size=16 * GIB))
    (axis,) = draw_predicted(tables).axes

    assert widths_of(axis) == {"parameters": [4, 16], "noise": [4, 16]}
    assert [text.get_text() for text in axis.texts] == ["1.00x", "4.00x"]
    (line,) = axis.lines
    assert line.get_xdata()[0] == L4.memory_bytes / GIB
    assert axis.get_title("right").endswith("T = 4, B = 2 on l4")


def test_the_line_is_seen_however_far_it_is(tmp_path) -> None:
    (axis,) = draw_predicted(tables_of_runs(tmp_path, estimate(size=2**20))).axes

    assert axis.get_xlim()[1] > L4.memory_bytes / GIB


def test_this_machine_is_a_target_without_a_line(tmp_path) -> None:
    figure = draw_predicted(tables_of_runs(tmp_path, estimate(device="cpu", target="cpu")))

    assert not figure.axes[0].lines
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["parameters", "noise"]


@pytest.mark.parametrize(
    ("draw", "on", "missing"),
    [
        (draw_breakdown, {}, "succeeded without a target"),
        (draw_predicted, {"device": "cpu", "target": None}, "for a target"),
    ],
)
def test_what_runs_here_and_what_is_predicted_elsewhere_are_apart(
    draw, on, missing, tmp_path
) -> None:
    with pytest.raises(NothingToDrawError, match=missing):
        draw(tables_of_runs(tmp_path, estimate(**on)))
