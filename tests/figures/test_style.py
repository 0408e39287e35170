"""Colours that stand for something stay apart, for whoever looks at them."""

import itertools

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from dpprof.experiments.records.terms import COMPONENTS, OP_KINDS, PHASES
from dpprof.results.figures.style import COMPONENT_COLOURS, HATCHES, OP_KIND_COLOURS, PHASE_MARKERS

# Machado et al. 2009, "A Physiologically-based Model for Simulation of Color Vision Deficiency".
SIGHTS = {
    "full": np.eye(3),
    "deuteranopia": np.array(
        [
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.011820, 0.042940, 0.968881],
        ]
    ),
    "protanopia": np.array(
        [
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ]
    ),
}
XYZ_OF_RGB = np.array(
    [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
)
WHITE = np.array([0.9505, 1.0, 1.089])


def lab(colour: str, sight: str) -> np.ndarray:
    """CIE L*a*b* of a colour as somebody sees it."""
    encoded = np.array(to_rgb(colour))
    linear = np.where(encoded <= 0.04045, encoded / 12.92, ((encoded + 0.055) / 1.055) ** 2.4)
    xyz = XYZ_OF_RGB @ np.clip(SIGHTS[sight] @ linear, 0, 1) / WHITE
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def test_every_component_has_a_colour_and_what_is_no_owner_a_hatch() -> None:
    assert tuple(COMPONENT_COLOURS) == COMPONENTS
    assert set(HATCHES) == {"unattributed", "other", "unknown", "idle"}


def test_every_op_kind_has_a_colour_and_what_is_none_a_hatch() -> None:
    assert set(OP_KIND_COLOURS) == {*OP_KINDS, "idle"}
    assert set(PHASE_MARKERS) == set(PHASES)
    assert len(set(PHASE_MARKERS.values())) == len(PHASES)


@pytest.mark.parametrize("colours", [COMPONENT_COLOURS, OP_KIND_COLOURS])
@pytest.mark.parametrize("sight", SIGHTS)
def test_colours_stay_apart(sight, colours) -> None:
    """A difference of 2.3 is just noticeable side by side; these may be far from each other."""
    seen = {name: lab(colour, sight) for name, colour in colours.items()}
    apart = {
        (one, other): float(np.linalg.norm(seen[one] - seen[other]))
        for one, other in itertools.combinations(seen, 2)
        # Two that are hatched are told apart by that.
        if HATCHES.get(one, "") == HATCHES.get(other, "") or not {one, other} <= set(HATCHES)
    }

    assert min(apart.values()) > 15, min(apart, key=apart.get)
