"""A value between measured points: by a plane through those nearest to it."""

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_BLUR = 0.05
"""Added to distances, so that no one point decides alone. In doublings of a size."""

_LEVEL = 0.05
"""Pulls the plane's slopes towards zero where the neighbours say little of them."""


def fit_plane(points: Floats, values: Floats, at: Floats, apart: Floats, neighbours: int) -> float:
    """Lay a plane through the points nearest to a place, and return its value there.

    Args:
        points: Logarithms of sizes to base 2, one row for each point.
        values: One for each point.
        at: The place.
        apart: How far each point is from the place besides, for what is not a size; infinite for
            one that does not count. At least one is finite.
        neighbours: How many points the plane goes through, where there are so many.
    """
    offsets = points - at
    squares = (offsets**2).sum(axis=1) + apart**2
    few = min(neighbours, int(np.isfinite(apart).sum()))
    nearest = np.argpartition(squares, few - 1)[:few]
    weights = 1 / (np.sqrt(squares[nearest]) + _BLUR)
    design = np.column_stack([np.ones(few), offsets[nearest]]) * weights[:, None]
    level = np.diag([0.0] + [_LEVEL] * len(at))
    right = np.concatenate([values[nearest] * weights, np.zeros(len(level))])
    return float(np.linalg.lstsq(np.concatenate([design, level]), right, rcond=None)[0][0])
