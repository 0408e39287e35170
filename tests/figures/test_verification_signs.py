"""Methods that are not verified, or another mechanism, bear a sign in every figure."""

import pytest
from drawing import FIGURES, draw, texts_of, typical_first
from matplotlib.figure import Figure

from dpprof.figures.verification_signs import mark_methods

DAGGER, DOUBLE_DAGGER = "\N{DAGGER}", "\N{DOUBLE DAGGER}"
DAGGERED = "opacus-ghost \N{DAGGER}"


@pytest.mark.parametrize("name", FIGURES)
def test_the_method_is_marked_and_no_other(name, full) -> None:
    figure = draw(name, full)
    found = mark_methods(figure, {DAGGER: {"opacus-ghost": "x", "opacus": "y"}})
    assert found == {DAGGER: ["opacus-ghost"]}

    texts = texts_of(figure)
    assert DAGGERED in texts
    assert "opacus-ghost" not in texts
    assert "standard" in texts
    assert figure.get_suptitle().endswith("\N{DAGGER} not verified to compute the right gradient")


@pytest.mark.parametrize("name", typical_first())
def test_where_all_are_verified_nothing_changes(name, full) -> None:
    figure, untouched = draw(name, full), draw(name, full)

    assert mark_methods(figure, {DAGGER: {}, DOUBLE_DAGGER: {}}) == {}
    assert texts_of(figure) == texts_of(untouched)
    assert figure.get_suptitle() == untouched.get_suptitle()


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
