"""Why one run needs more memory than another, in a sentence that a person would say."""

from collections.abc import Iterable, Sequence

from dpprof.analysis.difference.difference import Difference
from dpprof.analysis.difference.waterfall import (
    LEVELS,
    Bar,
    fold_blocks,
    format_size,
    name_component,
)
from dpprof.report.wording import listed

OUTSIDE = "outside the model"
_SINGULAR = {"optimizer_state", "noise", "workspace", "allocator_rounding", "unattributed"}
_MOST_LAYERS = 3
"""A sentence names this many layers at most."""

_NOTABLE = 0.2
"""A sentence names a second component that has at least this share of the difference."""


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
        second = gains[1:2] if _is_notable(gains[1:2], total) else []
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


def _is_notable(bars: Sequence[Bar], total: int) -> bool:
    return abs(_sum(bars)) >= _NOTABLE * abs(total)


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
