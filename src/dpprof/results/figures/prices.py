"""What do a smaller epsilon and more GPUs cost, and how fast is a training on them?"""

from collections.abc import Mapping
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from dpprof.experiments.config.architecture import PREFIX
from dpprof.experiments.config.parallel import read_world_size
from dpprof.results.analysis.advice.advice import hours_of_billion
from dpprof.results.analysis.selection import TRAINING, fits_privately, with_size
from dpprof.results.analysis.tables.axes import BASELINE, WITHOUT_BATCH, name_kind, name_speed
from dpprof.results.analysis.tables.frames import least_of
from dpprof.results.figures.bars import draw_bars, height_of
from dpprof.results.figures.labels import draw_line, ends_of, label_ends
from dpprof.results.figures.panels import Panel, Panels, break_title, split
from dpprof.results.figures.style import (
    SERIES_COLOURS,
    NothingToDrawError,
    method_style,
    new_figure,
    scale_log,
    sort_methods,
    tell,
)

_MOST_LABELS = 4  # more lines get a legend instead of names at their ends


def draw_budget(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """GPU hours over epsilon; lower is better.

    The number of steps and the noise of the averaged gradient are fixed, so a smaller epsilon needs
    more samples a step. Predicted: bars are 90 % intervals. Dashed: without privacy.
    """
    costs = tables["budget"].dropna(subset=["gpu_hours"])
    private = costs[costs["epsilon"].notna()]
    missing = "no privacy budget with hours; see privacy in config/README.md"
    panels = split(private, missing, but=["batch_size", "noise_multiplier"], most=4)
    epsilons = sorted(set(private["epsilon"]))
    methods = {*private["method"], *costs.loc[costs["epsilon"].isna(), "method"]}
    high = height_of(len(methods)) if len(epsilons) == 1 else 1.34
    figure, axes = panels.lay_out(row_inches=high)
    plain = costs[costs["method"] == BASELINE]
    drawn = [
        (axis, rows, plain.merge(rows[WITHOUT_BATCH].drop_duplicates(), on=WITHOUT_BATCH))
        for axis, (_, rows) in zip(axes, panels.shown, strict=True)
    ]
    if len(epsilons) == 1:
        for axis, rows, plain in drawn:
            ordered = pd.concat([rows, plain]).sort_values("gpu_hours").set_index("method")
            draw_bars(axis, *(ordered[f"gpu_hours{end}"] for end in ("", "_low", "_high")))
            axis.set_xlabel("GPU hours")
        return figure
    for axis, rows, plain in drawn:
        _draw_lines(axis, rows, plain, epsilons)
    _name_lines(figure, drawn, sort_methods(methods))
    tell(figure, _say_epsilons(panels.shown[0], epsilons, is_one=len(panels.shown) == 1))
    return figure


def draw_mechanisms(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """Noise of the sum over steps, and GPU hours with equal noise, over bands; lower is better.

    One band is independent noise. Left: with the planned batch. Right: as many steps, whose batch
    is the least with which the sum has independent noise's noise; bars are 90 % intervals. Bands
    without hours do not fit.
    """
    costs = tables["mechanisms"]
    if costs["gpu_hours"].isna().all():
        raise NothingToDrawError("no hours are predicted of any mechanism")
    kinds = costs["mechanism"].str.partition("-")
    costs = costs.assign(noise=kinds[0], bands=pd.to_numeric(kinds[2]).fillna(1))
    alone = costs["noise"] == "independent"
    figure, [[left, right]] = new_figure(2, row_inches=2.2)
    for at, (noise, rows) in enumerate(costs[~alone].groupby("noise")):
        line = pd.concat([costs[alone], rows]).sort_values("bands")
        style: dict[str, Any] = {"marker": "os"[at], "color": SERIES_COLOURS[at], "label": noise}
        left.plot(line["bands"], line["sum_noise"] / line["sum_noise"].iloc[0], **style)
        hours = line["gpu_hours"]
        ends = [hours - line["gpu_hours_low"], line["gpu_hours_high"] - hours]
        right.errorbar(line["bands"], hours, yerr=ends, elinewidth=0.6, **style)
    for axis, label in ((left, "noise of the sum, relative"), (right, "GPU hours")):
        scale_log(axis, sorted(set(costs["bands"])), "bands")
        axis.set_ylabel(label)
    right.set_xlim(left.get_xlim())
    left.legend()
    return figure


def _draw_lines(axis: Axes, rows: pd.DataFrame, plain: pd.DataFrame, epsilons: list[float]) -> None:
    for method, costs in rows.sort_values("epsilon").groupby("method"):
        name = str(method)
        draw_line(axis, costs, "epsilon", "gpu_hours", method=name, label=name)
    for hours in plain["gpu_hours"]:
        axis.axhline(hours, linestyle="--", linewidth=1, color=method_style(BASELINE)["color"])
    scale_log(axis, epsilons, "epsilon", base=10)
    axis.set_ylabel("GPU hours")


def _name_lines(
    figure: Figure, drawn: list[tuple[Axes, pd.DataFrame, pd.DataFrame]], methods: list[str]
) -> None:
    if len(methods) > _MOST_LABELS:
        handles = [Line2D([], [], label=name, **method_style(name)) for name in methods]
        figure.legend(handles=handles, loc="outside lower center", ncols=4)
        return
    figure.draw_without_rendering()
    dashed = {BASELINE: {"linestyle": "--", "marker": ""}}
    for axis, rows, plain in drawn:
        ends = ends_of(axis)
        ends += [(rows["epsilon"].max(), hours, BASELINE) for hours in plain["gpu_hours"]]
        label_ends(axis, ends, style_of=lambda name: method_style(name) | dashed.get(name, {}))


def _say_epsilons(panel: Panel, epsilons: list[float], *, is_one: bool) -> str:
    rows = panel.rows[panel.rows["verified"].ne(False)]
    if rows.empty:
        return ""
    least = least_of(rows, "gpu_hours")
    costs = rows[rows["method"] == least["method"]].set_index("epsilon")["gpu_hours"]
    low, high = epsilons[0], epsilons[-1]
    if not {low, high} <= set(costs.index):
        return ""
    where = "" if is_one else f", {panel.title}"
    times = costs[low] / costs[high]
    return (
        f"A smaller epsilon needs more samples a step: epsilon {low:g} takes {times:.1f} times the "
        f"hours of epsilon {high:g} ({least['method']}{where})."
    )


_LABELS = {
    "safe_batch_size": "samples on each GPU",
    "tokens_per_s": "{units}/s of all GPUs",
    "gpu_hours": "GPU hours per 10⁹ {units}",
}
_MOST = 3  # the panels that fit beside one another


def draw_ranks(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """Tokens per second of all GPUs, and GPU hours for a billion tokens, over the number of GPUs.

    Each method trains with its largest safe batch on every GPU; where no time is predicted, that
    batch is drawn. Predicted, not measured: bars are 90 % intervals. The price of tokens is their
    GPU hours times that of a GPU hour: a line that stays level costs the same on any number of
    GPUs.
    """
    advice = tables["advice"].loc[lambda rows: rows["verdict"].ne("wrong")]
    sized = with_size(advice, tables["runs"]).rename(columns={"model_size": "parameters_total"})
    ranks = advice["parallel"].map(read_world_size).astype(int)  # text, if there are no rows
    kinds = [name_kind(row) for _, row in advice.iterrows()]
    options = sized.assign(ranks=ranks, kind=kinds, parallel=None, batch_size=1)
    for end, speed in (("", ""), ("_low", "_high"), ("_high", "_low")):  # slow is dear
        each = advice[f"tokens_per_s{speed}"].astype(float) / ranks
        options[f"gpu_hours{end}"] = hours_of_billion(each)
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
    tell(figure, _say_gpus(every.shown))
    return figure


def _split(compared: pd.DataFrame, most: int) -> Panels:
    missing = "no training was asked about on several numbers of GPUs"
    return split(compared, missing, but=["batch_size", "parallel"], most=most)


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


def _say_gpus(panels: list[Panel]) -> str:
    said = []
    for title, rows in panels:
        fitting = rows.loc[fits_privately(rows), "ranks"]
        if len(fitting):
            # As page one has it: a foreign model without adapters is trained as a whole.
            whole = title.startswith(PREFIX) and "with LoRA" not in title
            name = f"{'all of ' if whole else ''}{title.removeprefix(PREFIX)}"
            said.append(f"{fitting.min()} {'GPU' if fitting.min() == 1 else 'GPUs'} for {name}")
    return f"Private training takes at least {'; '.join(said)}." if said else ""
