"""How experiments are divided among the panels of a figure."""

import math
import textwrap
from collections.abc import Iterable
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.figure import Figure

from dpprof.experiments.config.architecture import PREFIX
from dpprof.results.analysis.tables.axes import BASELINE, name_model, name_size
from dpprof.results.analysis.tables.frames import naming_axes, varying_axes
from dpprof.results.figures.style import NothingToDrawError, new_figure

MAX_PANELS = 12
_TITLE = 38  # the letters of a line of a title; longer lines leave the figure


class Panel(NamedTuple):
    """What one pair of axes shows."""

    title: str
    rows: pd.DataFrame

    def sorted_by(self, lengths: "pd.Series[float]") -> pd.DataFrame:
        """Return the rows by method: the baseline first, then from the shortest to the longest."""
        order = pd.DataFrame(
            {"private": self.rows["method"] != BASELINE, "length": lengths.astype(float)}
        )
        ordered = order.sort_values(["private", "length"], kind="stable").index
        return self.rows.loc[ordered].set_index("method")


class Panels(NamedTuple):
    """The panels of a figure, and the number of panels left out."""

    shown: list[Panel]
    beyond: int

    def lay_out(
        self, most: int = 2, *, title_at: str = "center", **options: Any
    ) -> tuple[Figure, list[Any]]:
        """Return a figure with one axis per panel, with at most ``most`` in a row.

        A title at the right of an axis has the room of the names beside it.
        """
        columns = min(most, len(self.shown))
        figure, axes = new_figure(columns, math.ceil(len(self.shown) / columns), **options)
        for axis in axes.flat[len(self.shown) :]:
            axis.axis("off")
        for axis, panel in zip(axes.flat, self.shown, strict=False):
            axis.set_title(break_title(panel.title), loc=title_at)
        self.note_hidden_panels(figure)
        return figure, list(axes.flat[: len(self.shown)])

    def note_hidden_panels(self, figure: Figure) -> None:
        """Write above the panels how many more there are, of settings with fewer methods."""
        if self.beyond > 0:
            left_out = f"{self.beyond:,} more {'panel is' if self.beyond == 1 else 'panels are'}"
            figure.suptitle(f"{left_out} left out; the tables have all", fontsize=8)


def break_title(title: str) -> str:
    """Return a title in lines, broken after commas."""
    lines: list[str] = []
    for part in title.split(", "):
        if lines and len(lines[-1]) + len(part) + 2 <= _TITLE:
            lines[-1] += f", {part}"
        else:
            lines.append(part)
    return ",\n".join("\n".join(textwrap.wrap(line, _TITLE)) for line in lines)


_SHORT = {"batch_size": "B"}


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
    a panel. Of more than ``most`` panels, those with most methods are kept, and among these those
    of the largest models and batches.

    Raises:
        NothingToDrawError: There are no rows.
    """
    if rows.empty:
        raise NothingToDrawError(missing)
    inside = {"method", *but}
    named = [name for name in ("model", "seq_len", "batch_size") if name not in inside]
    varying = varying_axes(rows, but={*named, *inside})
    outside = [*named, *varying, *also]
    named += naming_axes(rows, but={*named, *inside, "image_size"})
    size = rows[["parameters_total", "batch_size", "seq_len"]].astype(float).prod(axis=1)
    groups = [group for _, group in rows.assign(_size=size).groupby(outside, dropna=False)]
    ranks = [(group["method"].nunique(), float(group["_size"].max())) for group in groups]
    ranked = sorted(range(len(groups)), key=ranks.__getitem__, reverse=True)
    kept = [groups[number] for number in sorted(ranked[:most])]
    panels = [Panel(_title(group.iloc[0], named), group) for group in kept]
    return Panels(panels, len(groups) - len(panels))


def _title(row: Any, named: Iterable[str]) -> str:
    target = row.get("target")
    silent = {"target"} if pd.isna(target) else {"target", "device"}
    whole = {"model": lambda row: name_model(row).removeprefix(PREFIX), "seq_len": name_size}
    parts = [
        whole[name](row) if name in whole else f"{_SHORT.get(name, name)} = {row[name]}"
        for name in named
        if name not in silent and pd.notna(row[name])
    ]
    return ", ".join(parts) + ("" if pd.isna(target) else f" on {target}")
