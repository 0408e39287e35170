"""The waterfall from one peak to another: what one holds more, by component, layer and operator.

Each level sums to the one above, and the first to the difference of the peaks, with 0 bytes left.
Layers are matched by their path in the model. A layer that only one of the two has counts 0 in the
other.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypedDict

from dpprof.experiments.config.validation import InputError
from dpprof.experiments.records.result import Result
from dpprof.experiments.records.step_costs import Memory

ROUNDING = "allocator_rounding"
"""The component of bytes that belong to no tensor: what CUDA's caching allocator takes for whole
blocks, beyond the sizes of the timeline."""

_INSTRUMENTS = "memory, estimate, capacity"

_WORDS = {
    "per_sample_gradients": "per-sample gradients",
    "dp_activations": "activations that hooks keep",
    "allocator_rounding": "rounding of the allocator",
    "unattributed": "unattributed memory",
}
_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}


class Holding(TypedDict):
    """Bytes that are live at the peak, and what allocated them; all values are plain JSON."""

    component: str
    layer: str | None  # the module, by its path; None outside the model
    op: str
    phase: str
    bytes: int
    storages: int


def list_holdings(result: Result) -> list[Holding]:
    """Return every byte of a run's peak as rows, the largest first.

    The rows sum to ``memory.peak_allocated_bytes``, with 0 bytes left. Storages keep the sizes
    that the timeline counts, which are multiples of 512 bytes on CUDA. What the allocator's whole
    blocks take beyond these is a row of the component ``allocator_rounding``.

    Raises:
        InputError: The result does not record what was live at the peak.
    """
    memory = result.memory
    if memory is None or memory.at_peak is None or memory.at_peak.holdings is None:
        raise InputError(_explain_missing(result))
    held = memory.at_peak.holdings.model_dump()
    rows = [
        Holding(**dict(zip(held, row, strict=True)))  # type: ignore[typeddict-item]
        for row in zip(*held.values(), strict=True)
    ]
    rounding = peak_bytes(memory) - sum(row["bytes"] for row in rows)
    if rounding:
        of = {"component": ROUNDING, "op": "caching allocator", "phase": memory.at_peak.phase}
        rows.append(Holding(**of, layer=None, bytes=rounding, storages=0))  # type: ignore[typeddict-item]
    return rows


def peak_bytes(memory: Memory) -> int:
    """Return the peak of the steady state that holdings explain."""
    assert memory.peak_allocated_bytes is not None  # known wherever a timeline is
    return memory.peak_allocated_bytes


def _explain_missing(result: Result) -> str:
    if result.outcome != "ok":
        why = "" if result.error is None else ": " + " ".join(result.error.message.split())
        return f"the run ended as {result.outcome}, so its memory is unknown{why}"
    return (
        f"the instrument {result.instrument} does not record what was live at the peak; "
        f"run one of these instead: {_INSTRUMENTS}"
    )


def format_size(size: int) -> str:
    """Return a number of bytes in the largest unit that it fills, such as 540.0 MiB."""
    for unit, factor in _UNITS.items():
        if abs(size) >= factor:
            return f"{size / factor:,.1f} {unit}"
    return f"{size:,} bytes"


def format_change(size: int) -> str:
    """Return a number of bytes with its sign, such as +540.0 MiB."""
    return f"{'+' if size > 0 else ''}{format_size(size)}"


def name_component(component: str) -> str:
    """Return a component in words."""
    return _WORDS.get(component, component.replace("_", " "))


LEVELS: Mapping[str, Callable[[Holding], str | None]] = {
    "component": lambda held: held["component"],
    "layer": lambda held: held["layer"],
    "operator": lambda held: f"{held['op']} ({held['phase']})",
}
"""What holdings are grouped by, level by level."""

_NUMBER = re.compile(r"\.\d+(?=\.|$)")  # a part of a module's path that counts blocks


class Bar(NamedTuple):
    """A bar of the waterfall: what a component, a layer or an operator holds in each of the two."""

    name: str | None  # none for bytes outside the model
    a_bytes: int
    b_bytes: int
    bars: "tuple[Bar, ...]" = ()  # they sum to it, in A, in B and in the difference

    @property
    def difference_bytes(self) -> int:
        """What A holds more than B."""
        return self.a_bytes - self.b_bytes

    def differs(self, depth: int) -> bool:
        """Return whether it, or anything that many levels within it, has another size in A."""
        if self.difference_bytes:
            return True
        return depth > 0 and any(bar.differs(depth - 1) for bar in self.bars)


def subtract(
    a: Sequence[Holding], b: Sequence[Holding], levels: Sequence[str] = tuple(LEVELS)
) -> tuple[Bar, ...]:
    """Return the waterfall from B's peak to A's: bars by component, the largest difference first.

    Both sides are of ``list_holdings``; ``levels`` are names of ``LEVELS``, from the outermost on.

    Example:
        >>> held = {"layer": "head", "op": "bmm", "phase": "backward", "storages": 1}
        >>> a = [{"component": "per_sample_gradients", "bytes": 30, **held}]
        >>> b = [{"component": "gradients", "bytes": 10, **held}]
        >>> [(bar.name, bar.difference_bytes) for bar in subtract(a, b)]
        [('per_sample_gradients', 30), ('gradients', -10)]
    """
    if not levels:
        return ()
    level, *deeper = levels
    groups: dict[str | None, tuple[list[Holding], list[Holding]]] = defaultdict(lambda: ([], []))
    for side, rows in enumerate((a, b)):
        for held in rows:
            groups[LEVELS[level](held)][side].append(held)
    bars = []
    for name, sides in groups.items():
        a_bytes, b_bytes = (sum(held["bytes"] for held in side) for side in sides)
        bars.append(Bar(name, a_bytes, b_bytes, subtract(*sides, deeper)))
    return _sort(bars)


def _sort(bars: Iterable[Bar]) -> tuple[Bar, ...]:
    def rank(bar: Bar) -> tuple[int, int, str]:
        return -abs(bar.difference_bytes), -max(bar.a_bytes, bar.b_bytes), bar.name or ""

    return tuple(sorted(bars, key=rank))


def fold_blocks(bars: Iterable[Bar]) -> tuple[Bar, ...]:
    """Return bars by layer with one bar for the same layer of every block.

    What has the same path but for the first number is one, ``blocks.*.mlp.0 (24 layers)``. The
    bars still sum to the same.
    """
    groups: dict[str | None, list[Bar]] = defaultdict(list)
    for bar in bars:
        groups[bar.name and _NUMBER.sub(".*", bar.name, count=1)].append(bar)
    return _sort(
        _merge(f"{name} ({len(group):,} layers)", group) if len(group) > 1 else group[0]
        for name, group in groups.items()
    )


def _merge(name: str | None, group: Sequence[Bar]) -> Bar:
    within: dict[str | None, list[Bar]] = defaultdict(list)
    for bar in group:
        for part in bar.bars:
            within[part.name].append(part)
    return Bar(
        name,
        sum(bar.a_bytes for bar in group),
        sum(bar.b_bytes for bar in group),
        _sort(_merge(part, bars) for part, bars in within.items()),
    )
