"""The drawing's bars are the numbers, and everything has room."""

import itertools

import pytest
from differences import make_difference

from dpprof.results.figures.waterfall import draw

MIB = 2**20
A = [
    ("parameters", "head", "empty", 100 * MIB),
    ("per_sample_gradients", "blocks.0.mlp", "bmm", 60 * MIB),
    ("per_sample_gradients", "blocks.1.mlp", "bmm", 60 * MIB),
    ("noise", None, "normal", 3),
    ("inputs", None, "clone", 4),
]
B = [("parameters", "head", "empty", 100 * MIB), ("gradients", "head", "mm", 20 * MIB)]


def bars_of(axis) -> list[tuple[float, float]]:
    """Where bars start and end, from the top."""
    return [(bar.get_x(), bar.get_x() + bar.get_width()) for bar in axis.patches]


def test_each_bar_begins_where_the_one_above_ends() -> None:
    waterfall, _ = draw(make_difference(A, B)).axes
    first, *steps, last = bars_of(waterfall)

    assert first == (0, 120)
    assert steps[:2] == [(120, 240), (240, 220)]
    assert steps[2] == (220, pytest.approx(220 + 7 / MIB))
    assert last == (0, pytest.approx(220 + 7 / MIB))
    names = [label.get_text() for label in waterfall.get_yticklabels()]
    assert names == ["standard", "per-sample gradients", "gradients", "2 others", "flash"]


def test_sizes_and_layers_stand_beside_the_bars() -> None:
    waterfall, _ = draw(make_difference(A, B)).axes

    assert [text.get_text() for text in waterfall.texts] == [
        "120.0 MiB",
        "recorded, in backward",
        "+120.0 MiB",
        "blocks.*.mlp",
        "-20.0 MiB",
        "head",
        "+7 bytes",
        "220.0 MiB",
        "recorded, in backward",
    ]


def test_a_single_small_component_keeps_its_name() -> None:
    waterfall, _ = draw(make_difference(A[:4], B)).axes

    assert [label.get_text() for label in waterfall.get_yticklabels()][3] == "noise"


def test_both_timelines_are_drawn_over_the_same_phases() -> None:
    _, lines = draw(make_difference(A, B)).axes
    curves = [line for line in lines.lines if len(line.get_xdata()) > 1]

    assert [line.get_label() for line in curves] == ["standard", "flash"]
    for line, peak in zip(curves, (120, 220 + 7 / MIB), strict=True):
        assert list(line.get_xdata()) == pytest.approx([0, 0.4, 1])
        assert list(line.get_ydata()) == pytest.approx([peak / 2, peak, 0], abs=1e-6)
    assert [text.get_text() for text in lines.texts] == ["forward", "backward"]


def test_one_method_twice_has_two_colours() -> None:
    names = ("flash (batch size 2)", "flash (batch size 1)")
    waterfall, _ = draw(make_difference(A, B, names)).axes

    assert waterfall.patches[0].get_facecolor() != waterfall.patches[-1].get_facecolor()


CASES = {
    "many": (A, B, ("flash", "standard")),
    "equal": (B, B, ("flash", "standard")),
    "less": (B, A, ("flash", "standard")),
    "a few bytes": ([("inputs", None, "clone", 5)], [], ("flash", "standard")),
    "long names": (A, B, ("flash (" + "model of a name, " * 20 + ")", "standard ($x_2^$ \n\x1b)")),
    "long layers": (
        [("noise", "layer_" * 50 + str(n), "normal", n * MIB) for n in range(9)],
        B,
        ("flash", "standard"),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_names_do_not_overlap_and_panels_keep_their_size(case) -> None:
    a, b, names = CASES[case]
    figure = draw(make_difference(a, b, names), "why " * 60)
    figure.canvas.draw()
    waterfall, lines = figure.axes

    labels = [label.get_window_extent() for label in waterfall.get_yticklabels()]
    for above, below in itertools.pairwise(labels):
        assert below.y1 <= above.y0 + 2
    for axis in (waterfall, lines):
        assert axis.get_window_extent().width > 0.2 * figure.bbox.width
    for text in waterfall.texts:
        assert text.get_window_extent().x1 < lines.get_window_extent().x0
