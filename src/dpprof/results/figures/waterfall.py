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
from dpprof.results.figures.bars import VISIBLE, name_bars
from dpprof.results.figures.style import (
    BYTE_UNITS,
    COMPONENT_COLOURS,
    HATCHES,
    choose_byte_unit,
    method_style,
    new_figure,
)
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
    """A bar between the two peaks."""

    name: str
    component: str
    size: int
    layers: str


def draw(difference: Difference, title: str = "") -> Figure:
    """The waterfall from B's peak to A's by component, and both timelines on one axis.

    Components that differ by less than 0.5 % of the higher peak are one bar together. Beside each
    bar stand the layers that hold most of it. The timelines count storages alone; the same phases
    of both steps stand at the same place.
    """
    steps = _list_steps(difference)
    height = 1.0 + 0.3 * (len(steps) + 2)
    widths = {"width_ratios": [3, 2]}
    figure, axes = new_figure(2, 1, row_inches=height, gridspec_kw=widths)
    highest = max(difference.a.peak_bytes, difference.b.peak_bytes)
    unit = choose_byte_unit(highest)
    a, b = (method_style(side.method)["color"] for side in (difference.a, difference.b))
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
    steps = [
        _Step(name_component(str(bar.name)), str(bar.name), bar.difference_bytes, _name_layers(bar))
        for bar in shown
    ]
    if others := differing[len(shown) :]:
        size = sum(bar.difference_bytes for bar in others)
        steps.append(_Step(f"{len(others)} others", "other", size, ""))
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
    axis: Axes,
    difference: Difference,
    steps: Sequence[_Step],
    colours: tuple[str, str],
    unit: str,
) -> None:
    a, b, factor = difference.a, difference.b, BYTE_UNITS[unit]
    style: dict[str, Any] = {"height": 0.7, "edgecolor": "#333333", "linewidth": 0.4}
    axis.barh(0, b.peak_bytes / factor, color=colours[1], **style)
    level = b.peak_bytes
    for row, step in enumerate(steps, start=1):
        axis.plot([level / factor] * 2, [row - 0.65, row + 0.35], color="#333333", linewidth=0.5)
        axis.barh(
            row,
            step.size / factor,
            left=level / factor,
            color=COMPONENT_COLOURS.get(step.component, _OTHER),
            hatch=HATCHES.get(step.component, "" if step.component in COMPONENT_COLOURS else "//"),
            **style,
        )
        end = max(level, level + step.size) / factor
        _label(axis, row, end, format_change(step.size), step.layers)
        level += step.size
    last = len(steps) + 1
    axis.plot([level / factor] * 2, [last - 0.65, last + 0.35], color="#333333", linewidth=0.5)
    axis.barh(last, a.peak_bytes / factor, color=colours[0], **style)
    for row, side in ((0, b), (last, a)):
        _label(axis, row, side.peak_bytes / factor, format_size(side.peak_bytes), side.how)
    name_bars(axis, [_fold(b.name), *(step.name for step in steps), _fold(a.name)])
    axis.set_xlabel(f"live memory at the peak ({unit})")
    axis.set_xlim(0, axis.get_xlim()[1] * 1.6)


def _fold(name: str) -> str:
    """Return a name in lines that leave room for the bars."""
    return textwrap.fill(printable(name), _NAME, max_lines=2, placeholder=" ...")


def _label(axis: Axes, row: int, end: float, size: str, layers: str) -> None:
    """Write a bar's size after its end, and what it is made of below in small letters."""
    high = 4 if layers else 0
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.3}
    for text, offset, points in ((size, high, 6.5), (layers, -4, 5)):
        if text:
            axis.annotate(
                text,
                (end, row),
                xytext=(3, offset),
                textcoords="offset points",
                va="center",
                fontsize=points,
                color="black" if text == size else "#555555",
                bbox=box,
            )


def _draw_timelines(
    axis: Axes, difference: Difference, colours: tuple[str, str], unit: str
) -> None:
    shared, factor = difference.axis, BYTE_UNITS[unit]
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
