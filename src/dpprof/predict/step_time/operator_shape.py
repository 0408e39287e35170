"""The properties that an operator's time depends on: its work, and its arguments' layout."""

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any

from dpprof.experiments.records.operators import OperatorShape
from dpprof.predict.memory.events import Op


def moved_bytes(op: Op) -> int:
    """Return the bytes that an operator reads and writes, each once."""
    return sum(size for _, size in (*op.reads, *op.writes))


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
