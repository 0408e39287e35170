"""Methods that are not verified, or another mechanism, bear a sign in every figure."""

import pytest
from drawing import draw, texts_of, typical_first
from matplotlib.figure import Figure

from dpprof.results.figures.style import mark_methods

DAGGER, DOUBLE_DAGGER = "\N{DAGGER}", "\N{DOUBLE DAGGER}"
DAGGERED = "opacus-ghost \N{DAGGER}"


@pytest.mark.parametrize("name", typical_first())
def test_the_method_is_marked_and_no_other_and_a_hostile_name_is_drawn_as_it_is(name, full) -> None:
    evil = r"a_b%c&d#e$f{g}~h^i\j<k>l$x$"
    tables = {stem: table.replace({"opacus-ghost": evil}) for stem, table in full.items()}
    figure = draw(name, tables)
    found = mark_methods(figure, {DAGGER: {evil: "x", "a_b": "y"}})
    assert found == {DAGGER: [evil]}

    texts = texts_of(figure)
    assert f"{evil} {DAGGER}" in texts
    assert evil not in texts
    assert "standard" in texts
    assert figure.get_suptitle().endswith("\N{DAGGER} not verified to compute the right gradient")


@pytest.mark.parametrize("name", typical_first())
def test_where_all_are_verified_nothing_changes(name, drawn) -> None:
    figure = drawn(name)
    before = texts_of(figure), figure.get_suptitle()

    assert mark_methods(figure, {DAGGER: {}, DOUBLE_DAGGER: {}}) == {}
    assert (texts_of(figure), figure.get_suptitle()) == before


def test_a_legend_within_the_axes_is_marked_too() -> None:
    figure = Figure()
    axis = figure.subplots()
    axis.plot([1, 2], label="opacus-ghost")
    axis.legend()

    assert mark_methods(figure, {DAGGER: ["opacus-ghost"]}) == {DAGGER: ["opacus-ghost"]}
    assert axis.get_legend().get_texts()[0].get_text() == DAGGERED


def test_another_mechanism_has_a_sign_of_its_own_beside_the_first() -> None:
    figure = Figure()
    axis = figure.subplots()
    axis.set_yticks([1, 2, 3], ["per-layer", "opacus-adaptive", "flash"])
    marks = {DAGGER: ["opacus-adaptive"], DOUBLE_DAGGER: ["per-layer", "opacus-adaptive"]}

    assert mark_methods(figure, marks) == {
        DAGGER: ["opacus-adaptive"],
        DOUBLE_DAGGER: ["opacus-adaptive", "per-layer"],
    }
    assert [label.get_text() for label in axis.get_yticklabels()] == [
        f"per-layer {DOUBLE_DAGGER}",
        f"opacus-adaptive {DAGGER}{DOUBLE_DAGGER}",
        "flash",
    ]
    assert figure.get_suptitle() == (
        f"{DAGGER} not verified to compute the right gradient\n"
        f"{DOUBLE_DAGGER} another mechanism than flat clipping"
    )
