"""How long operators take on this machine, from those that were timed on it.

An operator that was timed with the same arguments takes its own time. Any other operator takes the
speed of the same operator in the same dtype at the nearest sizes, preferably with the same memory
layout. A speed is a share of a roofline. The roofline's two peaks are the fastest product and the
fastest traffic in the table, and no operator takes less time than the shortest call.
"""

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpprof.experiments.records.ceilings import (
    OperatorShape,
    OperatorTable,
    OperatorTime,
    ceilings_path,
    device_name,
    read_ceilings,
)
from dpprof.predict.memory.events import Op
from dpprof.predict.step_time.op_time import Z_90, OpTime, UnknownTimeError
from dpprof.predict.step_time.plane import Floats, fit_plane, log2
from dpprof.system.hardware import available_cores, cpu_name


def shape_of(op: Op) -> OperatorShape:
    """Return the properties of a recorded operator that its time depends on."""
    cost = op.cost
    layout, row = outline(op.call, is_reduction=cost.family == "reduction")
    return OperatorShape(
        op=cost.op,
        call=hashlib.sha256(op.call.encode()).hexdigest()[:20],
        layout=layout,
        family=cost.family,
        dtype=cost.dtype,
        flops=cost.flops,
        read_bytes=sum(size for _, size in op.reads),
        written_bytes=sum(size for _, size in op.writes),
        row=row,
        product=cost.product,
    )


@lru_cache(maxsize=2**14)
def outline(call: str, *, is_reduction: bool = False) -> tuple[str, int]:
    """Return the memory layout of a call's arguments, and the size of their last axis.

    Two calls of one layout differ in sizes alone.

    ``is_reduction`` says whether its list of numbers names axes.
    """
    name, args, _ = json.loads(call)
    tensors = list(_tensors(args))
    sizes = max((shape for shape, _, _ in tensors), key=math.prod, default=_numbers(args))
    words = [_layout_word(shape, strides, sizes) for shape, strides, _ in tensors[:4]]
    if is_reduction and sizes:
        axes = {axis % len(sizes) for axis in _numbers(args)}
        which = "with" if len(sizes) - 1 in axes else "without"
        words.append(f"{len(axes)} of {len(sizes)} axes {which} the last")
    words += ["".join(str(int(flag)) for flag in flags) for flags in args if _is_list(flags, bool)]
    return " ".join([name, *words]), sizes[-1] if sizes else 1


def _layout_word(shape: Sequence[int], strides: Sequence[int], largest: Sequence[int]) -> str:
    """Return a word for a tensor's layout, compared with the largest tensor of its call."""
    axes = [(size, stride) for size, stride in zip(shape, strides, strict=True) if size > 1]
    if not axes:
        return "one"
    if any(stride == 0 for _, stride in axes):
        return "expanded"
    inner = 1
    for size, stride in reversed(axes):
        if stride != inner:
            return "strided" if axes[-1][1] == 1 else "permuted"
        inner *= size
    if inner == math.prod(largest):
        return "whole"
    is_by_row = len(shape) == len(largest) and shape[-1] == 1 < largest[-1]
    return "by-row" if is_by_row else "part"


def _tensors(value: Any) -> Iterator[tuple[list[int], list[int], str]]:
    if isinstance(value, dict) and "t" in value:
        yield value["t"]
    elif isinstance(value, list):
        for item in value:
            yield from _tensors(item)


def _numbers(args: Sequence[Any]) -> list[int]:
    """Return the last list of whole numbers: sizes, or axes."""
    return next((value for value in reversed(args) if _is_list(value, int)), [])


def _is_list(value: Any, of: type) -> bool:
    return isinstance(value, list) and bool(value) and all(type(item) is of for item in value)


_NEIGHBOURS = 12
_LEAST_SPREAD = 0.02
_UNKNOWN_SPREAD = 0.7
"""The spread of an operator that resembles no timed one."""


_OTHER_LAYOUT = 5.0  # a different memory layout counts as much as this many doublings of a size

_LARGE = 2**20
"""Bytes: smaller data may be in a cache, so their speed is not the memory's bandwidth."""


class _Group(NamedTuple):
    """Timed operators of one kind: the logarithms of their sizes, and of their speeds."""

    of_products: bool
    sizes: Floats
    layouts: NDArray[np.str_]
    speeds: Floats

    def fit(self, sizes: Floats, layout: str, usable: NDArray[np.bool_]) -> float:
        """Return the logarithm of the speed at sizes, from the usable operators."""
        apart = np.where(self.layouts == layout, 0.0, _OTHER_LAYOUT)
        apart[~usable] = np.inf
        return fit_plane(self.sizes, self.speeds, sizes, apart, _NEIGHBOURS)


class OwnTable:
    """The times of operators on this machine."""

    def __init__(self, table: OperatorTable) -> None:
        self.host_s, self.host_spread = table.host_s, table.host_spread
        self.step_factor = table.step_factor
        self.drift = table.drift or 0.0
        self._known = {timed.call: timed for timed in table.operators}
        speeds = (timed.flops / timed.seconds for timed in table.operators)
        self._flops_per_s = max(speeds, default=1.0)
        large = [timed for timed in table.operators if _moved_bytes(timed) >= _LARGE]
        rates = (_moved_bytes(timed) / timed.seconds for timed in large)
        self._bytes_per_s = max(rates, default=1e10)
        self._least_s = min((timed.seconds for timed in table.operators), default=1e-6)
        groups: dict[tuple[str, str], list[OperatorTime]] = defaultdict(list)
        for timed in table.operators:
            groups[timed.op, timed.dtype].append(timed)
            groups[f"family {timed.family}", timed.dtype].append(timed)
        self._groups = {key: self._describe(some) for key, some in groups.items()}

    def predict(self, shape: OperatorShape) -> OpTime:
        """Predict the time of one call of an operator."""
        timed = self._known.get(shape.call)
        if timed is not None:
            return OpTime(timed.seconds, max(timed.spread, _LEAST_SPREAD), "measured at this shape")
        bound_s = self._bound_s(shape)
        for name in (shape.op, f"family {shape.family}"):
            group = self._groups.get((name, shape.dtype))
            if group is not None and group.of_products == (shape.product is not None):
                sizes = _sizes(shape, as_product=group.of_products)
                usable = np.ones(len(group.speeds), dtype=bool)
                seconds = bound_s / math.exp(group.fit(np.array(sizes), shape.layout, usable))
                within = (group.sizes.min(axis=0) <= sizes) & (sizes <= group.sizes.max(axis=0))
                if within.all():
                    return OpTime(seconds, self.spread, "interpolated")
                return OpTime(seconds, 2 * self.spread, "extrapolated")
        return OpTime(bound_s, _UNKNOWN_SPREAD, "extrapolated")

    @cached_property
    def spread(self) -> float:
        """Standard deviation of the logarithm of an interpolated time, from held-out shapes."""
        errors = [abs(math.log(predicted / true)) for predicted, true, _ in self.hold_out()]
        return float(np.quantile(errors, 0.9)) / Z_90 if errors else _UNKNOWN_SPREAD

    def hold_out(self) -> list[tuple[float, float, OperatorTime]]:
        """Return predicted and timed seconds of each operator, predicted from its other sizes."""
        pairs = []
        for timed in self._known.values():
            group = self._groups[timed.op, timed.dtype]
            sizes = np.array(_sizes(timed, as_product=group.of_products))
            usable = (group.sizes != sizes).any(axis=1)
            if usable.any():
                speed = group.fit(sizes, timed.layout, usable)
                pairs.append((self._bound_s(timed) / math.exp(speed), timed.seconds, timed))
        return pairs

    def _describe(self, some: Sequence[OperatorTime]) -> _Group:
        of_products = all(timed.product is not None for timed in some)
        return _Group(
            of_products,
            np.array([_sizes(timed, as_product=of_products) for timed in some], dtype=float),
            np.array([timed.layout for timed in some]),
            np.array([math.log(self._bound_s(timed) / timed.seconds) for timed in some]),
        )

    def _bound_s(self, shape: OperatorShape) -> float:
        streamed_s = _moved_bytes(shape) / self._bytes_per_s
        return self._least_s + max(shape.flops / self._flops_per_s, streamed_s)


def read_own_table(root: Path, threads: int | None) -> OwnTable:
    """Read the operators that were timed on this machine's processor.

    ``root`` is the folder in which ``results`` is; ``threads`` is None for all cores.

    Raises:
        UnknownTimeError: Nothing was timed, or by another PyTorch, or on another number of threads.
        ResultError: The ceilings' file is cut, edited, or of another version.
    """
    cores = available_cores()
    described = {"type": "cpu", "name": cpu_name(), "cores": cores}
    here, threads = version("torch"), threads or cores
    why = "no operators were timed on this machine"
    with suppress(FileNotFoundError):
        ceilings = read_ceilings(ceilings_path(root, device_name(described)))
        table, timed_by = ceilings.operators, ceilings.provenance["packages"]["torch"]
        if table is not None and timed_by == here and table.threads == threads:
            return OwnTable(table)
        if table is not None and timed_by != here:
            why = f"operators were timed by PyTorch {timed_by}, and this is {here}"
        elif table is not None:
            why = f"operators were timed on {table.threads} threads, and this has {threads}"
    raise UnknownTimeError(f"{why}; dpprof ceilings --device cpu --operators-of times them")


def _moved_bytes(shape: OperatorShape) -> int:
    return shape.read_bytes + shape.written_bytes


def _sizes(shape: OperatorShape, *, as_product: bool) -> tuple[float, ...]:
    """Return the logarithms of the sizes that a speed depends on, the weaker ones halved."""
    if as_product and shape.product is not None:
        return tuple(_log(size) for size in shape.product)
    weak = _log(shape.row) / 2, _log(shape.written_bytes) / 2
    return _log(_moved_bytes(shape)), _log(shape.flops), *weak


def _log(size: int) -> float:
    return log2(max(size, 1))
