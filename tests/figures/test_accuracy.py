import pytest
from factory import make_experiment, make_memory, tables_of_runs

from dpprof.figures import accuracy
from dpprof.figures.style import NothingToDrawError, method_style

PEAK = 200 * 2**20
HOOKS = make_experiment(method="opacus-hooks")


def run(instrument, size, experiment=HOOKS):
    return experiment, instrument, {"recorded": make_memory({"parameters": size})}


def measured(peak=PEAK, experiment=HOOKS):
    return experiment, "phases", {"peak_allocated_bytes": peak}


def marks(figure):
    """By their size, since that is what tells a timeline from an estimate: where marks are."""
    lines = [line for line in figure.axes[0].lines if line.get_marker() != "None"]
    return {
        line.get_markersize(): list(zip(line.get_xdata(), line.get_ydata(), strict=True))
        for line in lines
    }


def test_equal_peaks_lie_on_the_line_and_others_as_far_as_they_differ(tmp_path) -> None:
    tables = tables_of_runs(
        tmp_path, measured(), run("memory", PEAK), run("estimate", PEAK * 101 // 100)
    )
    figure = accuracy.draw(tables)

    assert marks(figure) == {4: [(200.0, 0.0)], 8: [(200.0, pytest.approx(1.0))]}
    ring = next(line for line in figure.axes[0].lines if line.get_markersize() == 8)
    assert ring.get_fillstyle() == "none"
    assert ring.get_markeredgecolor() == method_style("opacus-hooks")["color"]


def test_what_the_allocator_held_more_is_below_the_line(tmp_path) -> None:
    figure = accuracy.draw(tables_of_runs(tmp_path, measured(), run("memory", PEAK * 98 // 100)))

    assert marks(figure) == {4: [(200.0, pytest.approx(-2.0))]}


def test_grey_reaches_as_far_as_a_gap_may_go(tmp_path) -> None:
    figure = accuracy.draw(tables_of_runs(tmp_path, measured(), run("memory", PEAK)))
    (segment,) = figure.axes[0].collections[0].get_segments()

    assert segment.tolist() == [[200, pytest.approx(-0.1)], [200, pytest.approx(0.1)]]


def test_ticks_are_plain_numbers(tmp_path) -> None:
    sizes = (2 * 2**20, 2**30)
    experiments = [make_experiment(batch_size=size) for size in (2, 3)]
    runs = [
        made
        for experiment, size in zip(experiments, sizes, strict=True)
        for made in (measured(size, experiment), run("memory", size, experiment))
    ]
    figure = accuracy.draw(tables_of_runs(tmp_path, *runs))
    figure.draw_without_rendering()
    texts = {label.get_text() for label in figure.axes[0].get_xticklabels()}

    assert {"10", "100", "1,000"} <= texts


def test_what_cannot_be_compared_is_said(tmp_path) -> None:
    with pytest.raises(NothingToDrawError, match="has an allocator's peak to compare with"):
        accuracy.draw(tables_of_runs(tmp_path, run("memory", PEAK)))
