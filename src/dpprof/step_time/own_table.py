"""How long operators take on this machine: those that were timed on it, and others like them.

An operator that was timed with the same arguments takes its own time. Another takes the speed of
its like: of the same operator in the same dtype, at the sizes nearest to its own. A speed is a
share of a roofline whose two peaks are the fastest product and the fastest traffic in the table.
"""

import hashlib
import math
from collections import defaultdict
from collections.abc import Sequence
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpprof.flops.cost import Cost
from dpprof.records.ceilings import ceilings_path, device_name, read_ceilings
from dpprof.records.operators import OperatorTable, OperatorTime
from dpprof.step_time.nearby import Floats, fit_plane
from dpprof.step_time.op_time import Z_90, OpTime
from dpprof.system.hardware import available_cores, cpu_name

NEIGHBOURS = 12
_LEAST_SPREAD = 0.02
_UNKNOWN_SPREAD = 0.7
"""Of an operator that no timed one resembles."""


def digest_call(call: str) -> str:
    """Return the digest of a call that a table keeps."""
    return hashlib.sha256(call.encode()).hexdigest()[:20]


class _Group(NamedTuple):
    """Timed operators of one kind: the logarithms of their sizes, and of their speeds."""

    sizes: Floats
    speeds: Floats

    def fit(self, sizes: Floats, usable: NDArray[np.bool_]) -> float:
        """Return the logarithm of the speed at sizes, from the usable operators."""
        return fit_plane(self.sizes, self.speeds, sizes, usable, NEIGHBOURS)


class NoTableError(LookupError):
    """No operators were timed on this machine as an experiment would run them."""

    def __init__(self, why: str = "no operators were timed on this machine") -> None:
        super().__init__(f"{why}; dpprof ceilings --device cpu --operators-of times them")


class OwnTable:
    """The times of operators on this machine.

    Args:
        table: What was timed.
    """

    def __init__(self, table: OperatorTable) -> None:
        self.host_s, self.host_spread = table.host_s, table.host_spread
        self._known = {one.call: one for one in table.operators}
        timed = [one for one in table.operators if one.seconds > 0]
        self._flops_per_s = max((one.flops / one.seconds for one in timed), default=1.0)
        self._bytes_per_s = max((one.moved_bytes / one.seconds for one in timed), default=1.0)
        self._least_s = min((one.seconds for one in timed), default=1e-6)
        groups: dict[tuple[str, str], list[OperatorTime]] = defaultdict(list)
        for one in timed:
            groups[one.op, one.dtype].append(one)
            groups[f"family {one.family}", one.dtype].append(one)
        self._groups = {key: self._describe(some) for key, some in groups.items()}

    def predict(self, cost: Cost, moved_bytes: int, call: str) -> OpTime:
        """Predict the time of one call of an operator.

        Args:
            cost: What it computes.
            moved_bytes: What it reads and writes, each once.
            call: As ``flops.op_call`` describes it.
        """
        known = self._known.get(digest_call(call))
        if known is not None:
            return OpTime(known.seconds, max(known.spread, _LEAST_SPREAD), "measured at this shape")
        sizes = _sizes(cost.product, cost.flops, moved_bytes)
        bound_s = self._bound_s(cost.flops, moved_bytes)
        for name in (cost.op, f"family {cost.family}"):
            group = self._groups.get((name, cost.dtype))
            if group is not None and group.sizes.shape[1] == len(sizes):
                speed = group.fit(np.array(sizes), np.ones(len(group.speeds), dtype=bool))
                inside = bool(
                    ((group.sizes.min(axis=0) <= sizes) & (sizes <= group.sizes.max(axis=0))).all()
                )
                seconds = bound_s / math.exp(speed)
                if inside:
                    return OpTime(seconds, self.spread, "interpolated")
                return OpTime(seconds, 2 * self.spread, "extrapolated")
        return OpTime(bound_s, _UNKNOWN_SPREAD, "extrapolated")

    @cached_property
    def spread(self) -> float:
        """Standard deviation of the logarithm of what is interpolated, from held-out shapes."""
        errors = [abs(math.log(found / true)) for found, true, _ in self.hold_out()]
        return float(np.quantile(errors, 0.9)) / Z_90 if errors else _UNKNOWN_SPREAD

    def hold_out(self) -> list[tuple[float, float, OperatorTime]]:
        """Predict each timed operator from those of other sizes.

        Returns:
            Predicted and timed seconds; operators with no like of another size are left out.
        """
        found = []
        for one in self._known.values():
            group = self._groups.get((one.op, one.dtype))
            if group is None:
                continue
            sizes = np.array(_sizes(one.product, one.flops, one.moved_bytes))
            usable = np.abs(group.sizes - sizes).max(axis=1) > 1e-9  # noqa: PLR2004 (rounding)
            if not usable.any():
                continue
            speed = group.fit(sizes, usable)
            seconds = self._bound_s(one.flops, one.moved_bytes) / math.exp(speed)
            found.append((seconds, one.seconds, one))
        return found

    def _describe(self, some: Sequence[OperatorTime]) -> _Group:
        products = all(one.product is not None for one in some)
        rows = [
            _sizes(one.product if products else None, one.flops, one.moved_bytes) for one in some
        ]
        speeds = [math.log(self._bound_s(one.flops, one.moved_bytes) / one.seconds) for one in some]
        return _Group(np.array(rows, dtype=float), np.array(speeds))

    def _bound_s(self, flops: int, moved_bytes: int) -> float:
        return max(flops / self._flops_per_s, moved_bytes / self._bytes_per_s, self._least_s)


def read_own_table(root: Path, threads: int | None) -> OwnTable:
    """Read what was timed on this machine's processor.

    Args:
        root: The folder in which ``results`` is.
        threads: Of the experiment; None for all cores, as operators are timed.

    Raises:
        NoTableError: Nothing was timed, or by another PyTorch, or on another number of threads.
        ResultError: The ceilings' file is cut, edited, or of another version.
    """
    cores = available_cores()
    if threads not in (None, cores):
        raise NoTableError(f"operators are timed on all {cores} cores, not on {threads} threads")
    described = {"type": "cpu", "name": cpu_name(), "cores": cores}
    try:
        ceilings = read_ceilings(ceilings_path(root, device_name(described)))
    except FileNotFoundError:
        raise NoTableError from None
    if ceilings.operators is None:
        raise NoTableError
    timed_by = ceilings.provenance["packages"]["torch"]
    here = version("torch")
    if timed_by != here:
        raise NoTableError(f"operators were timed by PyTorch {timed_by}, and this is {here}")
    return OwnTable(ceilings.operators)


def _sizes(
    product: tuple[int, int, int, int] | None, flops: int, moved_bytes: int
) -> tuple[float, ...]:
    """Return the logarithms of the sizes that a speed depends on."""
    if product is not None:
        return tuple(math.log2(max(size, 1)) for size in product)
    return math.log2(max(moved_bytes, 1)), math.log2(max(flops, 1))
