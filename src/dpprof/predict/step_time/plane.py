"""A value between places where it is known: a plane through the nearest of them.

Places are logarithms of sizes. Many lie at the same distance from others, so the last bit of a
logarithm could decide which are the nearest, and processors differ in that bit. So logarithms come
from decimals here, which are the same everywhere, and all places as far away as the last one count.
"""

from decimal import Context
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

_BLUR = 0.05  # added to distances, so that no one point decides alone. In doublings of a size.
_LEVEL = 0.05  # pulls the plane's slopes towards zero where the neighbours say little of them

_PARTS = 2**20
"""Logarithms are whole numbers of such parts: their differences, and the squares, are exact."""

_DECIMAL = Context(prec=28)
_LN_2 = _DECIMAL.ln(2)


@lru_cache(maxsize=2**14)
def log2(size: int) -> float:
    """Return the logarithm of a size to base 2, to six decimals, the same on all processors."""
    parts = _DECIMAL.divide(_DECIMAL.multiply(_DECIMAL.ln(size), _PARTS), _LN_2)
    return round(parts) / _PARTS


def fit_plane(
    points: Floats, values: Floats, place: Floats, apart: Floats, neighbours: int
) -> float:
    """Fit a plane through the points nearest to a place, and return its value there.

    Args:
        points: Logarithms of sizes to base 2, by ``log2``, one row for each point.
        values: One for each point.
        place: Where the value of the plane is asked for.
        apart: A further distance of each point for differences other than sizes; infinite for a
            point that does not count. At least one is finite.
        neighbours: So many points, and those as far away as the last of them, make the plane.
    """
    offsets = points - place
    squares = (offsets**2).sum(axis=1) + apart**2
    few = min(neighbours, int(np.isfinite(apart).sum()))
    nearest = np.flatnonzero(squares <= np.partition(squares, few - 1)[few - 1])
    weights = 1 / (np.sqrt(squares[nearest]) + _BLUR)
    design = np.column_stack([np.ones(len(nearest)), offsets[nearest]]) * weights[:, None]
    level = np.diag([0.0] + [_LEVEL] * len(place))
    right = np.concatenate([values[nearest] * weights, np.zeros(len(level))])
    return float(np.linalg.lstsq(np.concatenate([design, level]), right, rcond=None)[0][0])
