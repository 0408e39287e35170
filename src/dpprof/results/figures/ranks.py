"""How many GPUs does a training take, and how fast is it on them?"""

from collections.abc import Mapping

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpprof.experiments.config.architecture import PREFIX
from dpprof.experiments.config.parallel import read_world_size
from dpprof.results.analysis.advice.advice import hours_of_billion
from dpprof.results.analysis.selection import TRAINING, fits_privately, with_size
from dpprof.results.analysis.tables.axes import name_kind, name_speed
from dpprof.results.figures.labels import draw_line, ends_of, label_ends
from dpprof.results.figures.panels import Panel, Panels, break_title, split
from dpprof.results.figures.style import method_style, new_figure, scale_log, tell

_LABELS = {
    "safe_batch_size": "samples on each GPU",
    "tokens_per_s": "{units}/s of all GPUs",
    "gpu_hours": "GPU hours per 10⁹ {units}",
}
_MOST = 3  # the panels that fit beside one another


def draw(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """Tokens per second of all GPUs, and GPU hours for a billion tokens, over the number of GPUs.

    Each method trains with its largest safe batch on every GPU; where no time is predicted, that
    batch is drawn. Predicted, not measured: bars are 90 % intervals. The price of tokens is their
    GPU hours times that of a GPU hour: a line that stays level costs the same on any number of
    GPUs.
    """
    advice = tables["advice"].loc[lambda rows: rows["verdict"].ne("wrong")]
    options = _add_hours(with_size(advice, tables["runs"]))
    keys = [options[name].map(str) for name in (*TRAINING, "target") if name in options]
    on_several = options["ranks"].where(options["safe_batch_size"].notna()).groupby(keys)
    compared = options[on_several.transform("nunique") > 1]
    every = _split(compared, len(compared))
    is_timed = compared["tokens_per_s"].where(compared["ranks"] > 1).notna()
    if is_timed.any():
        compared = compared[is_timed.groupby(keys).transform("any")]
    panels = _split(compared, _MOST)
    panels = panels._replace(beyond=len(every.shown) - len(panels.shown))
    figures = ["tokens_per_s", "gpu_hours"] if is_timed.any() else ["safe_batch_size"]
    figure, grid = new_figure(len(panels.shown), len(figures), row_inches=2.0)
    for row, name in zip(grid, figures, strict=True):
        for axis, panel in zip(row, panels.shown, strict=True):
            _draw_methods(axis, panel.rows, name)
    for axis, panel in zip(grid[0], panels.shown, strict=True):
        axis.set_title(break_title(panel.title))
    panels.note_hidden_panels(figure)
    figure.draw_without_rendering()
    for axis in grid.flat:
        label_ends(axis, ends_of(axis), style_of=method_style)
    tell(figure, _say(every.shown))
    return figure


def _split(compared: pd.DataFrame, most: int) -> Panels:
    missing = "no training was asked about on several numbers of GPUs"
    return split(compared, missing, but=["batch_size", "parallel"], most=most)


def _add_hours(advice: pd.DataFrame) -> pd.DataFrame:
    """Add GPU hours for a billion tokens; the number of GPUs gets a column of its own."""
    ranks = advice["parallel"].map(read_world_size)
    kinds = [name_kind(row) for _, row in advice.iterrows()]
    speeds = ("tokens_per_s", "tokens_per_s_high", "tokens_per_s_low")  # slow is dear
    hours = [hours_of_billion(advice[name].astype(float) / ranks) for name in speeds]
    names = ("gpu_hours", "gpu_hours_low", "gpu_hours_high")
    added = dict(zip(names, hours, strict=True))
    sized = advice.rename(columns={"model_size": "parameters_total"})
    return sized.assign(ranks=ranks, kind=kinds, parallel=None, batch_size=1, **added)


def _draw_methods(axis: Axes, rows: pd.DataFrame, name: str) -> None:
    kinds = sorted(set(rows["kind"]) - {""})
    ordered = rows.dropna(subset=[name]).sort_values("ranks")
    for method, every in ordered.groupby("method"):
        for kind in kinds:  # one process begins the line of each
            label = str(method) if len(kinds) == 1 else f"{method}, {kind}"
            options = every[every["kind"].isin(["", kind])]
            draw_line(axis, options, "ranks", name, method=str(method), label=label)
    scale_log(axis, sorted(set(rows["ranks"])), "GPUs")
    units = name_speed(row for _, row in rows.iterrows()).removesuffix("/s")
    axis.set_ylabel(_LABELS[name].format(units=units))


def _say(panels: list[Panel]) -> str:
    """Return the fewest GPUs on which a private method safely fits, of each training."""
    said = []
    for title, rows in panels:
        fitting = rows.loc[fits_privately(rows), "ranks"]
        if len(fitting):
            # As page one has it: a foreign model without adapters is trained as a whole.
            whole = title.startswith(PREFIX) and "with LoRA" not in title
            name = f"{'all of ' if whole else ''}{title.removeprefix(PREFIX)}"
            said.append(f"{fitting.min()} {'GPU' if fitting.min() == 1 else 'GPUs'} for {name}")
    return f"Private training takes at least {'; '.join(said)}." if said else ""
