"""A difference of two peaks as a sentence, and as a table for terminals.

Differences are what A holds more than B, so they are negative where A holds less.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from dpprof.ask.layout import lay_out
from dpprof.results.analysis.difference.difference import Difference, Side
from dpprof.results.analysis.difference.waterfall import (
    LEVELS,
    Bar,
    fold_blocks,
    format_change,
    format_size,
    name_component,
)
from dpprof.results.report.rendering.templates import on_one_line
from dpprof.system.words import listed

OUTSIDE = "outside the model"
_SINGULAR = {"optimizer_state", "noise", "workspace", "allocator_rounding", "unattributed"}
_MOST_LAYERS = 3
"""A sentence names this many layers at most."""

_NOTABLE = 0.2  # a sentence names a second component that has at least this share of the difference


_WIDTH = 24  # columns of a terminal for the bars


def say(difference: Difference) -> str:
    """Say in a sentence what explains most of the difference."""
    a, b, total = difference.a.name, difference.b.name, difference.difference_bytes
    if not total:
        inside = (
            ", held in other places"
            if any(bar.differs(len(LEVELS)) for bar in difference.bars)
            else ""
        )
        return f"{a} and {b} need the same: {format_size(difference.a.peak_bytes)}{inside}."
    sign = 1 if total > 0 else -1
    said = f"{a} needs {format_size(abs(total))} {_more(sign)} than {b}"
    gains = [bar for bar in difference.bars if sign * bar.difference_bytes > 0]
    losses = [bar for bar in difference.bars if sign * bar.difference_bytes < 0]
    first = gains[0]
    if abs(first.difference_bytes) <= abs(total):
        parts = [f"{_size(first)} of it {_verb(first)} {_word(first)}{_where(first)}"]
        second = [bar for bar in gains[1:2] if abs(bar.difference_bytes) >= _NOTABLE * abs(total)]
        parts += [f"{_size(bar)} {_verb(bar)} {_word(bar)}" for bar in second]
    else:
        parts = [f"it holds {_size(first)} {_more(sign)} of {_word(first)}{_where(first)}"]
        parts += [f"{_size(bar)} {_more(-sign)} of {_word(bar)}" for bar in losses[:1]]
    return f"{said}: {', and '.join(parts)}."


def _more(sign: int) -> str:
    return "more" if sign > 0 else "less"


def _size(bar: Bar) -> str:
    return format_size(abs(bar.difference_bytes))


def _word(bar: Bar) -> str:
    return name_component(str(bar.name))


def _verb(bar: Bar) -> str:
    return "is" if bar.name in _SINGULAR else "are"


def _where(bar: Bar) -> str:
    """Say in which layers more than half of a component's difference is."""
    sign = 1 if bar.difference_bytes > 0 else -1
    layers = [layer for layer in fold_blocks(bar.bars) if sign * layer.difference_bytes > 0]
    named: list[Bar] = []
    for layer in layers:
        named.append(layer)
        if 2 * abs(_sum(named)) > abs(_sum(layers)):
            break
    if len(named) > _MOST_LAYERS:
        return f", spread over {len(layers):,} layers"
    mostly = "mostly " if len(layers) > len(named) else ""
    inside = [layer.name for layer in named if layer.name is not None]
    places = [f"in {listed(inside)}"] if inside else []
    places += [OUTSIDE] if len(inside) < len(named) else []
    return f", {mostly}{' and '.join(places)}"


def _sum(bars: Iterable[Bar]) -> int:
    return sum(bar.difference_bytes for bar in bars)


class Detail(NamedTuple):
    """How much of a waterfall is shown."""

    depth: str = "layer"  # the innermost level, of ``LEVELS``
    top: int = 5
    """How many layers of a component, and operators of a layer, have a line of their own; the
    others of each have one together."""

    every_layer: bool = False  # whether the same layer of every block has a line of its own


class Row(NamedTuple):
    """A line of the waterfall."""

    depth: int  # 0 for a component, 1 for a layer, 2 for an operator
    name: str
    a_bytes: int
    b_bytes: int
    start: int  # bytes at which the bar starts; it ends at ``start`` plus the difference

    @property
    def difference_bytes(self) -> int:
        """What A holds more than B."""
        return self.a_bytes - self.b_bytes


def list_rows(difference: Difference, detail: Detail) -> list[Row]:
    """Return the lines of the waterfall from B's peak to A's, outer ones before their parts.

    At every depth they sum to the difference, or to the line that they are part of. What is equal
    in both down to the innermost level has no line.
    """
    levels = list(LEVELS)[: list(LEVELS).index(detail.depth) + 1]
    return [*_walk(difference.bars, difference.b.peak_bytes, levels, detail)]


def _walk(
    bars: Sequence[Bar], start: int, levels: Sequence[str], detail: Detail, depth: int = 0
) -> Iterator[Row]:
    if depth == len(levels):
        return
    level = levels[depth]
    if level == "layer" and not detail.every_layer:
        bars = fold_blocks(bars)
    bars = [bar for bar in bars if bar.differs(len(levels) - 1 - depth)]
    # One that is left over takes no more room than the line that would stand for it.
    shown = len(bars) if depth == 0 or len(bars) == detail.top + 1 else detail.top
    for bar in bars[:shown]:
        name = OUTSIDE if bar.name is None else bar.name
        name = name_component(name) if level == "component" else name
        yield Row(depth, name, bar.a_bytes, bar.b_bytes, start)
        yield from _walk(bar.bars, start, levels, detail, depth + 1)
        start += bar.difference_bytes
    if others := bars[shown:]:
        sums = sum(bar.a_bytes for bar in others), sum(bar.b_bytes for bar in others)
        yield Row(depth, f"{len(others):,} other {level}s", *sums, start)


def render_text(difference: Difference, detail: Detail) -> str:
    """Return the sentence and the waterfall for a terminal, with a bar on each line."""
    a, b = difference.a, difference.b
    rows = list_rows(difference, detail)
    ends = [end for row in rows for end in (row.start, row.start + row.difference_bytes)]
    low, high = min([*ends, a.peak_bytes, b.peak_bytes]), max([*ends, a.peak_bytes, b.peak_bytes])
    blank = " " * _WIDTH
    lines = [(f"{b.peak_bytes:,}", format_size(b.peak_bytes), blank, _describe("B", b))]
    for row in rows:
        size = row.difference_bytes
        label = "  " * row.depth + row.name
        lines.append((f"{size:+,}", format_change(size), _draw(row, low, high), label))
    lines.append((f"{a.peak_bytes:,}", format_size(a.peak_bytes), blank, _describe("A", a)))
    shared = [f"Both: {', '.join(difference.shared)}."] if difference.shared else []
    said = [say(difference), *shared, "", *lay_out(lines, texts=(2, 3))]
    depth = list(LEVELS).index(detail.depth)
    equal = [
        f"{name_component(str(bar.name))} ({format_size(bar.a_bytes)})"
        for bar in difference.bars
        if not bar.differs(depth)
    ]
    said += ["", f"Equal in both: {', '.join(equal)}."] if equal else []
    return "\n".join(map(on_one_line, said))


def _describe(letter: str, side: Side) -> str:
    """Say which run a side is, and where its peak is."""
    made = "" if side.op is None else f", at {side.op}"
    made += "" if side.module is None else f" of {side.module}"
    return f"{letter}: {side.name}, {side.how}{made}"


def _draw(row: Row, low: int, high: int) -> str:
    """Return the bar of a line: filled for more, shaded for less, at least one column wide."""
    size = row.difference_bytes
    if not size:
        return ""
    edges = sorted((row.start, row.start + size))
    left, right = ((edge - low) * _WIDTH // (high - low) for edge in edges)
    left = min(left, _WIDTH - 1)
    letter = "█" if size > 0 else "░"
    return " " * left + letter * max(right - left, 1)
