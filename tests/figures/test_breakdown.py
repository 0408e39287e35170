import pytest
from factory import make_experiment, make_memory, tables_of_runs
from matplotlib.backends.backend_agg import FigureCanvasAgg

from dpprof.figures import breakdown
from dpprof.figures.style import COMPONENT_COLOURS, NothingToDrawError

MIB = 2**20
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


def test_bars_are_the_owners_at_the_peak_and_the_number_is_their_ratio(tmp_path) -> None:
    (axis,) = breakdown.draw(measured(tmp_path)).axes
    widths = {
        container.get_label(): [bar.get_width() for bar in container]
        for container in axis.containers
    }

    assert widths == {
        "parameters": [10, 10],
        "gradients": [30, 30],
        "per sample gradients": [0, 60],
        "unattributed": [0, 4],
    }
    assert axis.containers[-1].patches[0].get_hatch()
    assert [label.get_text() for label in axis.get_yticklabels()] == ["standard", "opacus-hooks"]
    assert [text.get_text() for text in axis.texts] == ["1.00x", "2.60x"]


def test_a_tick_marks_the_allocators_peak_where_it_is_known(tmp_path) -> None:
    (axis,) = breakdown.draw(measured(tmp_path)).axes
    ticks = next(line for line in axis.lines if line.get_marker() == "|")

    assert list(ticks.get_xdata()) == pytest.approx([41.0, float("nan")], nan_ok=True)
    # What is written stands clear of whichever is longer.
    assert axis.texts[0].xy == (41.0, 0)


def test_what_is_predicted_for_another_device_is_no_part_of_it(tmp_path) -> None:
    elsewhere = make_experiment(method="standard", device="cuda", target="l4")
    tables = tables_of_runs(tmp_path, (elsewhere, "estimate", {"recorded": make_memory(OWNED)}))

    with pytest.raises(NothingToDrawError, match="succeeded without a target"):
        breakdown.draw(tables)


@pytest.mark.parametrize("lengths", [[4], [4, 8]])
def test_even_with_every_component_no_legend_is_cut(lengths, tmp_path) -> None:
    recorded = make_memory(dict.fromkeys(COMPONENT_COLOURS, MIB))
    method = "opacus-fast-gradient-clipping"
    experiments = [make_experiment(method=method, seq_len=length) for length in lengths]
    runs = [(experiment, "memory", {"recorded": recorded}) for experiment in experiments]
    figure = breakdown.draw(tables_of_runs(tmp_path, *runs))
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    box = figure.legends[0].get_window_extent(canvas.get_renderer())

    width, height = canvas.get_width_height()
    assert 0 <= box.x0 < box.x1 <= width
    assert 0 <= box.y0 < box.y1 <= height
    assert len(figure.legends[0].get_texts()) == 15
    for axis in figure.axes:
        assert axis.get_window_extent().height > 20
