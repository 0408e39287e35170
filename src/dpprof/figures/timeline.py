"""When in a step is which memory in use?"""

from collections.abc import Mapping

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpprof.figures.bars import VISIBLE, share_legend
from dpprof.figures.census import MISSING, by_snapshot
from dpprof.figures.panels import Panel, Panels, split
from dpprof.figures.style import COMPONENT_COLOURS, sort_methods

_MIB = 2**20


def draw(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """Memory by owner from snapshot to snapshot, a panel a method; the line is the peak in between.

    Of all settings the largest that every method succeeded in, or most of them.

    Args:
        tables: Of these, ``components`` and ``experiments``.
    """
    census = by_snapshot(tables)
    experiments = tables["experiments"]
    known = experiments["experiment_id"].isin(census.index.get_level_values("experiment_id"))
    told = experiments[known & (experiments["peak_kind"] == "allocated")]
    settings = split(told, MISSING, most=len(told))
    focus = max(settings.shown, key=lambda panel: (len(panel.rows), *_size(panel.rows)))
    rows = focus.rows.drop_duplicates("method").set_index("method")
    shown = [Panel(name, rows.loc[[name]]) for name in sort_methods(rows.index)]
    figure, axes = Panels(shown, 0).lay_out(row_inches=1.5, sharey=True, sharex=True)
    snapshots = max((census.loc[name] for name in rows["experiment_id"]), key=len).index
    for position, (axis, panel) in enumerate(zip(axes, shown, strict=True)):
        experiment = panel.rows.iloc[0]
        moments = census.loc[experiment["experiment_id"]].reindex(snapshots) / _MIB
        _draw(axis, moments, experiment["peak_bytes"] / _MIB)
        if position % 2 == 0:
            axis.set_ylabel("allocated (MiB)")
    for axis in axes[-2:]:
        axis.tick_params(axis="x", labelbottom=True)
    figure.suptitle(focus.title, fontsize=8)
    share_legend(figure, axes, COMPONENT_COLOURS)
    return figure


def _size(rows: pd.DataFrame) -> tuple[float, ...]:
    return tuple(rows[["parameters_total", "batch_size", "seq_len"]].max())


def _draw(axis: Axes, census: pd.DataFrame, peak: float) -> None:
    bottom = pd.Series(0.0, index=census.index)
    for name, colour in COMPONENT_COLOURS.items():
        if name in census and (census[name] > peak * VISIBLE).any():
            axis.bar(
                range(len(census)),
                census[name],
                bottom=bottom,
                width=0.85,
                color=colour,
                edgecolor="#333333",
                linewidth=0.3,
                label=name.replace("_", " "),
            )
            bottom = bottom + census[name]
    axis.axhline(peak, color="black", linewidth=0.8, linestyle="--")
    axis.annotate(
        f"peak {peak:,.1f} MiB",
        (0, peak),
        xytext=(0, 2),
        textcoords="offset points",
        fontsize=7,
    )
    axis.set_ylim(0, max(peak, axis.get_ylim()[1] / 1.15) * 1.15)
    names = [str(name).replace("_", " ") for name in census.index]
    axis.set_xticks(range(len(names)), names, rotation=40, ha="right", fontsize=6)
    axis.grid(visible=False, axis="x")
