"""Why does one run need more memory than another? Drawn from two results by ``dpprof explain``."""

import textwrap
from collections.abc import Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpprof.results.analysis.difference.difference import Difference
from dpprof.results.analysis.difference.waterfall import (
    Bar,
    fold_blocks,
    format_change,
    format_size,
    name_component,
)
from dpprof.results.figures import style
from dpprof.results.figures.bars import VISIBLE, name_bars
from dpprof.results.figures.timeline import mark_phases
from dpprof.system.console import printable

_OTHER = "#F2F2F2"
_SAME_METHOD = "#999999"
_MOST_LAYERS = 2
_LAYER = 28  # letters of a layer's name
_TITLE = 105  # letters in a line of the title
_NAME = 24  # letters in a line of a run's name; two lines have room beside its bar
_LETTER = 0.022  # width of a letter of a phase's name, as a share of the panel's width


class _Step(NamedTuple):
    """A bar: one of the peaks, or what is between them."""

    name: str
    size: int
    said: str  # of its size
    below: str  # what it is made of
    look: dict[str, Any]


def draw(difference: Difference, title: str = "") -> Figure:
    """The waterfall from B's peak to A's by component, and both timelines on one axis.

    Components that differ by less than 0.5 % of the higher peak are one bar together. Beside each
    bar stand the layers that hold most of it. The timelines count storages alone; the same phases
    of both steps stand at the same place.
    """
    steps = _list_steps(difference)
    height = 1.0 + 0.3 * (len(steps) + 2)
    widths = {"width_ratios": [3, 2]}
    figure, axes = style.new_figure(2, 1, row_inches=height, gridspec_kw=widths)
    highest = max(difference.a.peak_bytes, difference.b.peak_bytes)
    unit = style.choose_byte_unit(highest)
    a, b = (style.method_style(side.method)["color"] for side in (difference.a, difference.b))
    colours = (a, b if a != b else _SAME_METHOD)
    _draw_steps(axes[0, 0], difference, steps, colours, unit)
    _draw_timelines(axes[0, 1], difference, colours, unit)
    figure.suptitle("\n".join(textwrap.wrap(printable(title), _TITLE)), fontsize=8)
    return figure


def _list_steps(difference: Difference) -> list[_Step]:
    least = VISIBLE * max(difference.a.peak_bytes, difference.b.peak_bytes)
    differing = [bar for bar in difference.bars if bar.difference_bytes]
    shown = [bar for bar in differing if abs(bar.difference_bytes) > least]
    if len(shown) + 1 == len(differing):
        shown = differing
    steps = []
    for bar in shown:
        name, size = str(bar.name), bar.difference_bytes
        look = {"color": style.COMPONENT_COLOURS.get(name, _OTHER)}
        look["hatch"] = style.HATCHES.get(name, "" if name in style.COMPONENT_COLOURS else "//")
        words = name_component(name)
        steps.append(_Step(words, size, format_change(size), _name_layers(bar), look))
    if others := differing[len(shown) :]:
        size = sum(bar.difference_bytes for bar in others)
        look = {"color": _OTHER, "hatch": style.HATCHES["other"]}
        steps.append(_Step(f"{len(others)} others", size, format_change(size), "", look))
    return steps


def _name_layers(bar: Bar) -> str:
    """Name the layers that differ most in a component, in its direction."""
    layers = [
        layer.name
        for layer in fold_blocks(bar.bars)
        if layer.name is not None and layer.difference_bytes * bar.difference_bytes > 0
    ]
    named = [
        textwrap.shorten(printable(name.partition(" (")[0]), _LAYER)
        for name in layers[:_MOST_LAYERS]
    ]
    return ", ".join(named) + (", ..." if len(layers) > _MOST_LAYERS else "")


def _draw_steps(
    axis: Axes, difference: Difference, steps: Sequence[_Step], colours: tuple[str, str], unit: str
) -> None:
    ends = [
        _Step(_fold(side.name), side.peak_bytes, format_size(side.peak_bytes), side.how, look)
        for side, look in zip(
            difference[:2], ({"color": colour} for colour in colours), strict=True
        )
    ]
    bars, factor, level = [ends[1], *steps, ends[0]], style.BYTE_UNITS[unit], 0
    for row, step in enumerate(bars):
        edge: dict[str, Any] = {"height": 0.7, "edgecolor": "#333333", "linewidth": 0.4}
        if row:
            places = [row - 0.65, row + 0.35]
            axis.plot([level / factor] * 2, places, color="#333333", linewidth=0.5)
        start = 0 if row in (0, len(bars) - 1) else level
        axis.barh(row, step.size / factor, left=start / factor, **step.look, **edge)
        level = start + step.size
        _label(axis, row, max(start, level) / factor, step)
    name_bars(axis, [step.name for step in bars])
    axis.set_xlabel(f"live memory at the peak ({unit})")
    axis.set_xlim(0, axis.get_xlim()[1] * 1.6)


def _fold(name: str) -> str:
    return textwrap.fill(printable(name), _NAME, max_lines=2, placeholder=" ...")


def _label(axis: Axes, row: int, end: float, step: _Step) -> None:
    high = 4 if step.below else 0
    texts = ((step.said, high, 6.5, "black"), (step.below, -4, 5, "#555555"))
    for text, offset, points, colour in texts[: 2 if step.below else 1]:
        axis.annotate(
            text,
            (end, row),
            xytext=(3, offset),
            textcoords="offset points",
            va="center",
            fontsize=points,
            color=colour,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.3},
        )


def _draw_timelines(
    axis: Axes, difference: Difference, colours: tuple[str, str], unit: str
) -> None:
    shared, factor = difference.axis, style.BYTE_UNITS[unit]
    for curve, side, colour, dashes in (
        (shared.b, difference.b, colours[1], "--"),
        (shared.a, difference.a, colours[0], "-"),
    ):
        totals = [size / factor for size in curve.total_bytes]
        axis.plot(curve.at, totals, dashes, color=colour, linewidth=1.1, label=_fold(side.name))
        peak = totals.index(max(totals))
        mark: dict[str, Any] = {"color": colour, "markersize": 3, "markeredgecolor": "#333333"}
        axis.plot(curve.at[peak], totals[peak], "o", **mark)
    phases = ((stretch.phase, stretch.start, stretch.end) for stretch in shared.stretches)
    mark_phases(axis, phases, 1.0, _LETTER)
    axis.set_xlim(0, 1)
    axis.set_ylim(0, max((*shared.a.total_bytes, *shared.b.total_bytes)) / factor * 1.2)
    axis.set_xticks([])
    axis.grid(visible=False)
    axis.set_xlabel("operators run, phase by phase")
    axis.set_ylabel(f"live memory ({unit})")
    axis.legend(loc="lower center")
