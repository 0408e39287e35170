"""How fast a device multiplies matrices of each shape: a table of measured speeds.

A speed is a share of the roofline: the time that the data sheet's peaks allow over the time
measured. Shares change slowly with a shape, while times span six orders of magnitude. So shares are
interpolated: by a plane through the nearest measured shapes, in the logarithms of the sizes and of
the share. A share is above 1 where the device's cache held the operands.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache
from importlib.resources import files
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpprof.experiments.records.terms import Basis
from dpprof.predict.step_time.op_time import OpTime
from dpprof.predict.step_time.plane import Floats, fit_plane, log2

_NEIGHBOURS = 16  # the plane goes through this many measured shapes
_FAR = 1.0  # doublings of n or k beyond the table; further away the spread grows no more
UNIT = 1e4  # shares are kept as whole numbers of these parts


class PeakRates(NamedTuple):
    """The data sheet's figures that shares are of."""

    flops_per_s: float
    bytes_per_s: float


def bound_s(sizes: tuple[Any, Any, Any, Any], itemsize: int, peaks: PeakRates) -> Any:
    """Return the least seconds of products by the roofline.

    Args:
        sizes: Batch, m, n and k of products of ``(m, k)`` and ``(k, n)`` matrices: numbers or
            arrays.
        itemsize: Bytes of an element.
        peaks: The device's.
    """
    batch, m, n, k = sizes
    flops = 2.0 * batch * m * n * k
    moved = float(itemsize) * batch * (m * k + k * n + m * n)
    return np.maximum(flops / peaks.flops_per_s, moved / peaks.bytes_per_s)


def _combine(axes: Sequence[Sequence[float]]) -> NDArray[Any]:
    """Return all combinations of numbers, one of each axis, on a grid of these axes."""
    return np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1)


class ProductTable:
    """Measured speeds of products of one dtype on one device."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        sizes = [document[name] for name in ("m", "n", "k")]
        parts = np.asarray(document["shares"], dtype=float)
        is_measured = parts > 0
        self.shapes: NDArray[np.int64] = _combine(sizes)[is_measured]
        """Sizes ``(m, n, k)`` of the measured products, one row each."""

        self.shares: Floats = parts[is_measured] / UNIT
        """The share of the roofline that each reached."""

        self._logs: Floats = _combine([list(map(log2, axis)) for axis in sizes])[is_measured]
        self._log_shares = np.log(self.shares)
        self._spreads: dict[Basis, float] = document["spreads"]
        self._more_rows: float = document["more_rows_spread"]
        """The spread of products that are beyond the table in rows alone. A device divides them
        into more of the same tiles."""

        self._known = {tuple(row): index for index, row in enumerate(self.shapes.tolist())}
        self._low, self._high = self.shapes.min(axis=0), self.shapes.max(axis=0)
        self.find = lru_cache(maxsize=4096)(self._find)

    def _find(self, m: int, n: int, k: int) -> tuple[float, float, Basis]:
        """Return a share of the roofline, its spread, and what it rests on."""
        index = self._known.get((m, n, k))
        if index is not None:
            basis: Basis = "measured at this shape"
            return float(self.shares[index]), self._spreads[basis], basis
        inside = np.clip((m, n, k), self._low, self._high).tolist()
        share = self.fit(inside, np.ones(len(self._logs), dtype=bool))
        beyond_m, beyond_n, beyond_k = (
            log2(size) - log2(edge) for size, edge in zip((m, n, k), inside, strict=True)
        )
        others = max(abs(beyond_n), abs(beyond_k), -beyond_m)
        if others > 0:
            spread = self._spreads["extrapolated"] * (1 + min(others, _FAR))
            return share, spread, "extrapolated"
        if beyond_m > 0:
            return share, self._more_rows, "extrapolated"
        return share, self._spreads["interpolated"], "interpolated"

    def fit(self, shape: Iterable[int], usable: NDArray[np.bool_]) -> float:
        """Fit a plane through the usable shapes nearest to a shape, and return its share there.

        ``usable`` has a value for each row of the table.
        """
        apart, place = np.where(usable, 0.0, np.inf), np.array([log2(size) for size in shape])
        return math.exp(fit_plane(self._logs, self._log_shares, place, apart, _NEIGHBOURS))

    def predict(self, shape: tuple[int, int, int, int], itemsize: int, peaks: PeakRates) -> OpTime:
        """Predict ``batch`` products of ``(m, k)`` and ``(k, n)`` matrices.

        A batch is as fast as one product with as many rows: a device divides both into the same
        tiles.
        """
        batch, m, n, k = shape
        if 0 in shape:
            return OpTime(0.0, 0.0, "measured at this shape")
        share, spread, basis = self.find(batch * m, n, k)
        if batch > 1 and basis == "measured at this shape":
            basis = "interpolated"
        seconds = float(bound_s(shape, itemsize, peaks)) / share
        return OpTime(seconds, spread, basis)


@cache
def read_product_table(name: str) -> ProductTable:
    """Read a table that is part of dpprof, by the device's name, such as ``h100``."""
    return ProductTable(read_document(name))


@cache
def read_document(name: str) -> dict[str, Any]:
    """Read the content of a table's file."""
    text = files("dpprof.predict.step_time").joinpath("tables", f"{name}.json").read_text("utf-8")
    document: dict[str, Any] = json.loads(text)
    return document
