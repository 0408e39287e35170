"""How experiments are divided among the panels of a figure."""

import math
import textwrap
from collections.abc import Iterable
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.figure import Figure

from dpprof.analysis.axes import name_model
from dpprof.analysis.frames import naming_axes, varying_axes
from dpprof.figures.style import NothingToDrawError, new_figure, sort_methods

MAX_PANELS = 12
_TITLE = 46
"""The letters of a line of a title; longer lines leave the figure."""


class Panel(NamedTuple):
    """What one pair of axes shows."""

    title: str
    rows: pd.DataFrame

    @property
    def by_method(self) -> pd.DataFrame:
        """The rows by method, in the order of every figure."""
        rows = self.rows.set_index("method")
        return rows.loc[sort_methods(rows.index)]


class Panels(NamedTuple):
    """The panels of a figure, and the number of panels left out."""

    shown: list[Panel]
    beyond: int

    def lay_out(self, most: int = 2, **options: Any) -> tuple[Figure, list[Any]]:
        """Return a figure with one axis per panel, with at most ``most`` in a row."""
        columns = min(most, len(self.shown))
        figure, axes = new_figure(columns, math.ceil(len(self.shown) / columns), **options)
        for axis in axes.flat[len(self.shown) :]:
            axis.axis("off")
        for axis, panel in zip(axes.flat, self.shown, strict=False):
            axis.set_title(textwrap.fill(panel.title, _TITLE))
        self.tell_beyond(figure)
        return figure, list(axes.flat[: len(self.shown)])

    def tell_beyond(self, figure: Figure) -> None:
        """Write above the panels how many of all settings they show."""
        if self.beyond > 0:
            count = len(self.shown)
            figure.suptitle(f"the largest {count} of {count + self.beyond:,} settings", fontsize=8)


_SHORT = {"seq_len": "T", "batch_size": "B"}


def split(
    rows: pd.DataFrame,
    missing: str,
    *,
    but: Iterable[str] = (),
    also: Iterable[str] = (),
    most: int = MAX_PANELS,
) -> Panels:
    """Return one panel for each combination of the axes in which experiments differ.

    The method and the axes in ``but`` do not separate panels.

    ``missing`` is the message where there are no rows. Columns in ``also`` must not vary within
    a panel. Of more than ``most`` panels, those of the largest models and batches are kept.

    Raises:
        NothingToDrawError: There are no rows.
    """
    if rows.empty:
        raise NothingToDrawError(missing)
    inside = {"method", *but}
    named = [name for name in ("model", "seq_len", "batch_size") if name not in inside]
    varying = varying_axes(rows, but={*named, *inside})
    outside = [*named, *varying, *also]
    named += naming_axes(rows, but={*named, *inside})
    size = rows[["parameters_total", "batch_size", "seq_len"]].astype(float).prod(axis=1)
    groups = [group for _, group in rows.assign(_size=size).groupby(outside, dropna=False)]
    sizes = sorted((float(group["_size"].max()) for group in groups), reverse=True)
    least = sizes[min(most, len(sizes)) - 1]
    kept = [group for group in groups if float(group["_size"].max()) >= least][-most:]
    panels = [Panel(_title(group.iloc[0], named), group) for group in kept]
    return Panels(panels, len(groups) - len(panels))


def _title(row: Any, named: Iterable[str]) -> str:
    target = row.get("target")
    silent = {"target"} if pd.isna(target) else {"target", "device"}
    parts = [
        name_model(row) if name == "model" else f"{_SHORT.get(name, name)} = {row[name]}"
        for name in named
        if name not in silent and pd.notna(row[name])
    ]
    return ", ".join(parts) + ("" if pd.isna(target) else f" on {target}")
