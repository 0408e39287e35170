"""Names beside points and lines do not overlap, and stand as near as they can."""

import itertools

from matplotlib.backends.backend_agg import FigureCanvasAgg

from dpprof.results.figures.labels import label_ends, label_points
from dpprof.results.figures.style import method_style, new_figure

METHODS = ("standard", "flash", "flash-bk", "microbatch", "opacus-ew", "opacus-ghost", "per-layer")


def boxes_of(figure, axis):
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return [text.get_window_extent(canvas.get_renderer()) for text in axis.texts]


def test_names_of_crowded_points_do_not_overlap_in_one_column() -> None:
    figure, axes = new_figure(row_inches=2.4)
    axis = axes[0, 0]
    points = [(1 + 0.05 * (n % 3), 1 + 0.1 * (n // 3)) for n in range(len(METHODS))]
    axis.plot(*zip(*points, strict=True), "o")
    axis.set_xlim(0.5, 2.5)
    label_points(figure, axis, points, METHODS)

    assert [text.get_text() for text in axis.texts] == list(METHODS)
    for one, other in itertools.combinations(boxes_of(figure, axis), 2):
        assert not one.overlaps(other)


def test_a_piece_of_each_line_stands_before_its_name() -> None:
    figure, axes = new_figure(row_inches=2.2)
    axis = axes[0, 0]
    axis.plot([1, 2], [1, 3])
    figure.draw_without_rendering()
    label_ends(axis, [(2.0, 3.0, "flash"), (2.0, 1.0, "standard")], style_of=method_style)
    texts = {text.get_text(): text.get_window_extent() for text in axis.texts}

    assert {one.get_color() for one in figure.artists} == {
        method_style(name)["color"] for name in texts
    }
    for name, box in texts.items():
        (piece,) = (
            one.get_window_extent()
            for one in figure.artists
            if one.get_color() == method_style(name)["color"]
        )
        assert axis.bbox.x1 < piece.x0 < piece.x1 <= box.x0
        assert box.y0 <= (piece.y0 + piece.y1) / 2 <= box.y1


def test_names_of_lines_that_end_together_do_not_overlap() -> None:
    figure, axes = new_figure(row_inches=2.2)
    axis = axes[0, 0]
    axis.plot([1, 2], [1, 3])
    figure.draw_without_rendering()
    label_ends(axis, [(2.0, 3.0, name) for name in METHODS])

    for one, other in itertools.combinations(boxes_of(figure, axis), 2):
        assert not one.overlaps(other)
