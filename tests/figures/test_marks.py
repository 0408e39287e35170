"""Methods that are not verified bear a dagger in every figure, whoever drew it."""

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from test_figures import FIGURES, draw, tables_of

from dpprof.figures.marks import mark_unverified

DAGGERED = "opacus-ghost \N{DAGGER}"


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    return tables_of(tmp_path_factory.mktemp("full"))


def texts_of(figure) -> list[str]:
    FigureCanvasAgg(figure).draw()
    texts = [t.get_text() for legend in figure.legends for t in legend.get_texts()]
    texts += [label.get_text() for axis in figure.axes for label in axis.get_yticklabels()]
    return texts + [axis.get_title() for axis in figure.axes]


@pytest.mark.parametrize("name", FIGURES)
def test_the_method_is_marked_and_no_other(name, full) -> None:
    figure = draw(name, full)
    assert mark_unverified(figure, {"opacus-ghost": "x", "opacus": "y"}) == ["opacus-ghost"]

    texts = texts_of(figure)
    assert DAGGERED in texts
    assert "opacus-ghost" not in texts
    assert "standard" in texts
    assert figure.get_suptitle().endswith("\N{DAGGER} not verified to compute the right gradient")


@pytest.mark.parametrize("name", FIGURES)
def test_where_all_are_verified_nothing_changes(name, full) -> None:
    figure, untouched = draw(name, full), draw(name, full)

    assert mark_unverified(figure, {}) == []
    assert texts_of(figure) == texts_of(untouched)
    assert figure.get_suptitle() == untouched.get_suptitle()


def test_a_legend_within_the_axes_is_marked_too() -> None:
    figure = Figure()
    axis = figure.subplots()
    axis.plot([1, 2], label="opacus-ghost")
    axis.legend()

    assert mark_unverified(figure, ["opacus-ghost"]) == ["opacus-ghost"]
    assert axis.get_legend().get_texts()[0].get_text() == DAGGERED
