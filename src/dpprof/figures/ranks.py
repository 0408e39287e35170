"""How many GPUs does a training take, and how fast is it on them?"""

from collections.abc import Mapping

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

from dpprof.analysis.advice.scaling import BILLION
from dpprof.analysis.selection import TRAINING, fits_privately
from dpprof.analysis.tables.axes import name_model, name_size
from dpprof.figures.labels import label_ends
from dpprof.figures.panels import break_title
from dpprof.figures.style import NothingToDrawError, method_style, new_figure, spell_tick, tell
from dpprof.spec.architecture import PREFIX
from dpprof.spec.parallel import read_world_size

_LABELS = {
    "safe_batch_size": "samples on each GPU",
    "tokens_per_s": "tokens/s of all GPUs",
    "gpu_hours": "GPU hours per 10⁹ tokens",
}
_INTERVALS = {
    "tokens_per_s": ("tokens_per_s_low", "tokens_per_s_high"),
    "gpu_hours": ("gpu_hours_low", "gpu_hours_high"),
}
_MOST = 3
"""The panels that fit beside one another."""


def draw(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """Tokens per second of all GPUs, and GPU hours for a billion tokens, over the number of GPUs.

    Each method trains with its largest safe batch on every GPU; where no time is predicted, that
    batch is drawn. Nothing ran: bars are 90 % intervals of the prediction. The price of tokens is
    their GPU hours times that of a GPU hour: a line that stays level costs the same on any number
    of GPUs.
    """
    known = _add_hours(tables["advice"].sort_values("target"))
    axes = [name for name in (*TRAINING, "target") if name in known]
    keys = [known[name].map(str) for name in axes]
    panels = [
        rows
        for _, rows in known.groupby(keys, sort=False)
        if len(set(rows.loc[rows["safe_batch_size"].notna(), "ranks"])) > 1
    ][:_MOST]
    if not panels:
        raise NothingToDrawError("no training was asked about on several numbers of GPUs")
    drawn = pd.concat(panels)
    is_timed = drawn.loc[drawn["ranks"] > 1, "tokens_per_s"].notna().any()
    figures = list(_INTERVALS) if is_timed else ["safe_batch_size"]
    figure, grid = new_figure(len(panels), len(figures), row_inches=2.0)
    for row, name in zip(grid, figures, strict=True):
        for axis, rows in zip(row, panels, strict=True):
            _draw_methods(axis, rows, name)
    for axis, rows in zip(grid[0], panels, strict=True):
        one = rows.iloc[0].drop("parallel")
        axis.set_title(break_title(f"{name_model(one)}, {name_size(one)} on {one['target']}"))
    figure.draw_without_rendering()
    for axis in grid.flat:
        lines = [(line.get_xydata()[-1], str(line.get_label())) for line in axis.lines]
        label_ends(axis, [(float(x), float(y), name) for (x, y), name in lines])
    tell(figure, _say(panels))
    return figure


def _add_hours(advice: pd.DataFrame) -> pd.DataFrame:
    """Add the number of GPUs, and GPU hours for a billion tokens."""
    ranks = advice["parallel"].map(read_world_size)
    speeds = ("tokens_per_s", "tokens_per_s_high", "tokens_per_s_low")  # slow is dear
    hours = [ranks * BILLION / 3600 / advice[name].astype(float) for name in speeds]
    names = ("gpu_hours", *_INTERVALS["gpu_hours"])
    return advice.assign(ranks=ranks, **dict(zip(names, hours, strict=True)))


def _draw_methods(axis: Axes, rows: pd.DataFrame, name: str) -> None:
    for method, options in rows.dropna(subset=[name]).sort_values("ranks").groupby("method"):
        style = method_style(str(method))
        values = options[name].astype(float)
        axis.plot(options["ranks"], values, label=method, linewidth=1, markersize=4, **style)
        if name in _INTERVALS:
            low, high = (options[end].astype(float) for end in _INTERVALS[name])
            axis.vlines(options["ranks"], low, high, linewidth=0.6, color=style["color"])
    axis.set_xscale("log", base=2)
    axis.set_xticks(sorted(set(rows["ranks"])))
    axis.xaxis.set_major_formatter(FuncFormatter(spell_tick))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.set_xlabel("GPUs")
    axis.set_ylabel(_LABELS[name])
    axis.set_ylim(bottom=0)
    axis.margins(x=0.1)


def _say(panels: list[pd.DataFrame]) -> str:
    """Return the fewest GPUs on which a private method safely fits, by target."""
    said = []
    for rows in panels:
        fitting = rows[fits_privately(rows)]
        if len(fitting):
            said.append(f"{fitting['ranks'].min()} x {fitting['target'].iloc[0]}")
    name = name_model(panels[0].iloc[0].drop("parallel")).removeprefix(PREFIX)
    return f"To train {name} privately takes at least {' or '.join(said)}." if said else ""
