"""Lines of methods, and names beside what they name, so that no legend has to be looked up."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.transforms import Bbox
from scipy.optimize import isotonic_regression

from dpprof.results.figures.style import method_style

Place = tuple[float, float]

_SIZE = 6.5
_LINE = 8.0  # distance of the lines of text, in points
_PIECE = 14.0  # length of the piece of a line before its name, and of the gap behind it, in points
_TRIES = 6  # lines that a name may be moved, before it stands where it overlaps least
_PLACES = [
    (side, away, way * line * _LINE)
    for line, way in itertools.product(range(_TRIES), (1, -1))
    for side, away in (("left", 5.0), ("right", -5.0))
]
"""Where a name may stand, the nearest to its point first: side, and offset in points."""


def label_points(
    figure: Figure,
    axis: Axes,
    points: Sequence[Place],
    names: Sequence[str],
    lines: Sequence[tuple[Place, Place]] = (),
) -> None:
    """Write a name beside each point, clear of other names, points and error bars.

    Places are in data coordinates, ``lines`` those of error bars.

    Call this last: it lays the figure out, and what moves the axes afterwards moves the points too.
    """
    names_of = [
        axis.annotate(
            name, point, xytext=(5, 0), textcoords="offset points", fontsize=_SIZE, va="center"
        )
        for point, name in zip(points, names, strict=True)
    ]
    # Room for names is made by the limits of the axes, so that the layout does not depend on them.
    for text in names_of:
        text.set_in_layout(False)
    canvas: Any = FigureCanvasAgg(figure)
    canvas.draw()
    renderer = canvas.get_renderer()
    inside = axis.get_window_extent(renderer)
    half = 3.0 * figure.dpi / 72
    centres = [axis.transData.transform(point) for point in points]
    marks = [Bbox([centre - half, centre + half]) for centre in centres]
    taken = [*marks]
    taken += [Bbox(axis.transData.transform(line)).padded(1.0) for line in lines]
    for text, mark in zip(names_of, marks, strict=True):
        others = [box for box in taken if box is not mark]
        best = min(_PLACES, key=lambda place: _badness(text, place, others, inside, renderer))
        text.set(horizontalalignment=best[0], position=best[1:])
        taken.append(text.get_window_extent(renderer))


def _badness(
    text: Any, place: tuple[str, float, float], others: Sequence[Bbox], inside: Bbox, renderer: Any
) -> tuple[float, float]:
    """Return what speaks against a place: the area that overlaps or is outside, the distance."""
    text.set(horizontalalignment=place[0], position=place[1:])
    box = text.get_window_extent(renderer)
    hidden = sum(_shared(box, other) for other in others)
    outside = box.width * box.height - _shared(box, inside)
    return hidden + outside, abs(place[2])


def _shared(box: Bbox, other: Bbox) -> float:
    both = Bbox.intersection(box, other)
    return 0.0 if both is None else float(both.width * both.height)


def draw_line(
    axis: Axes, rows: pd.DataFrame, along: str, name: str, *, method: str, label: str
) -> None:
    """Draw a method's line through a column of rows, with intervals where rows have their ends."""
    look = method_style(method)
    axis.plot(rows[along], rows[name].astype(float), label=label, linewidth=1, markersize=4, **look)
    if f"{name}_low" in rows:
        low, high = (rows[f"{name}_{end}"].astype(float) for end in ("low", "high"))
        axis.vlines(rows[along], low, high, color=look["color"], linewidth=0.6)


def ends_of(axis: Axes) -> list[tuple[float, float, str]]:
    """Return the last point of each line that has a name and a point, with the name."""
    return [
        (float(x), float(y), str(line.get_label()))
        for line in axis.lines
        if not str(line.get_label()).startswith("_")  # as those of error bars
        for x, y in np.asarray(line.get_xydata())[-1:]
    ]


def label_ends(
    axis: Axes,
    ends: Sequence[tuple[float, float, str]],
    edge: float = 1.0,
    style_of: Callable[[str], dict[str, Any]] | None = None,
) -> None:
    """Write the name of each line to the right of its axes, as high as its end, without overlap.

    The figure was laid out, and the axes have their final limits. ``ends`` are in data coordinates,
    each with a name. Names are written beyond ``edge``, a share of the width of the axes. A piece
    of its line, which looks as ``style_of`` returns, stands before a name.
    """
    figure = axis.figure
    inches = axis.get_position().height * figure.get_figheight()  # type: ignore[union-attr]
    to_axes = axis.transData + axis.transAxes.inverted()
    placed = sorted((float(to_axes.transform((x, y))[1]), name) for x, y, name in ends)
    heights = spread([height for height, _ in placed], _LINE / 72 / inches)
    wide = 0.0
    if style_of is not None:
        wide = _PIECE / 72 / (axis.get_position().width * figure.get_figwidth())  # type: ignore[union-attr]
    left = edge + 0.03
    for height, (_, name) in zip(heights, placed, strict=True):
        if style_of is not None:
            places = [left + share * wide for share in (0.0, 0.4, 0.8)]
            look: Any = {"linewidth": 1, "markersize": 4, "markevery": [1]} | style_of(name)
            figure.add_artist(
                Line2D(places, [height] * 3, transform=axis.transAxes, clip_on=False, **look)
            )
        axis.annotate(
            name, (left + wide, height), xycoords="axes fraction", fontsize=_SIZE, va="center"
        )


def spread(heights: Sequence[float], gap: float) -> list[float]:
    """Return ascending heights moved apart to at least a gap, each as little as possible.

    Neighbours that are too near share their middle, as do the groups that they become.
    """
    if not heights:
        return []
    gaps = gap * np.arange(len(heights))
    return list(isotonic_regression(np.asarray(heights) - gaps).x + gaps)
