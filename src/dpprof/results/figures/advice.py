"""How fast does each method train as sequences grow, and where does it stop fitting?

Drawn of what ``dpprof advise`` says of several sequence lengths.
"""

import textwrap
from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import StrMethodFormatter

from dpprof.experiments.records.advice import Advice
from dpprof.results.analysis.standings import Marks
from dpprof.results.figures.labels import draw_line, ends_of, label_ends
from dpprof.results.figures.panels import Panel, Panels
from dpprof.results.figures.scaling import dress
from dpprof.results.figures.style import COLUMN_INCHES, mark_methods, say_nothing_to_draw

_ALONG, _SPEED = "seq_len", "tokens_per_s"
_MARGIN = 1.15  # the room on either side of the lengths, as a factor
_NOTE = 90  # the letters of a line below a panel
_CROSS: dict[str, Any] = {"marker": "x", "color": "black", "linestyle": "none"}
_CROSS |= {"markersize": 5, "markeredgewidth": 1.2, "label": "no safe batch at the next length"}


def draw(advices: Sequence[Advice], marks: Marks) -> Figure:
    """Tokens per second over the sequence length, each method with its largest safe batch.

    Nothing ran: bars are 90 % intervals of the prediction. A cross marks the last length at which
    a method has a safe batch. A panel is one dtype, on one number of ranks, with adapters or
    without. Where no time is predicted at all, the figure says so instead.
    """
    listed = []
    for side in (side for advice in advices for side in advice.sides):
        trained = "" if side.lora is None else " with LoRA"
        ranks = "" if side.parallel is None else f", {side.parallel}"
        title = f"{side.model}{trained}{ranks}, {side.dtype} on {side.target}"
        setting = {"title": title, _ALONG: side.seq_len}
        listed += [setting | option.model_dump() for option in side.options]
    rows = pd.DataFrame(listed)
    if rows.empty or rows[_SPEED].isna().all():
        return say_nothing_to_draw("Nothing to draw: no time is predicted for any safe batch.")
    rows["too_large"] = rows["safe_batch_size"].isna() & (rows["verdict"] != "failed")
    panels = [Panel(str(title), group) for title, group in rows.groupby("title", sort=False)]
    figure, axes = Panels(panels, 0).lay_out(most=1, width_inches=2 * COLUMN_INCHES)
    for axis, panel in zip(axes, panels, strict=True):
        for method, options in panel.rows.groupby("method"):
            _draw_method(axis, str(method), options.sort_values(_ALONG))
        dress(axis, panel, _ALONG, "tokens per second")
        lengths = panel.rows[_ALONG]
        axis.set_xlim(lengths.min() / _MARGIN, lengths.max() * _MARGIN)
        axis.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
        never = panel.rows.groupby("method")["too_large"].all()
        if absent := ", ".join(never.index[never]):
            said = textwrap.fill(f"no safe batch at any length: {absent}", _NOTE)
            axis.set_xlabel(f"{axis.get_xlabel()}\n{said}")
    if any(line.get_marker() == "x" for axis in axes for line in axis.lines):
        figure.legend(handles=[Line2D([], [], **_CROSS)], loc="outside lower center")
    figure.draw_without_rendering()
    for axis in axes:
        _name_lines(axis)
    mark_methods(figure, marks)
    return figure


def _draw_method(axis: Axes, method: str, options: pd.DataFrame) -> None:
    """Draw the line of a method, and the cross where it ends because longer ones do not fit."""
    timed = options.dropna(subset=[_SPEED])
    if timed.empty:
        return
    draw_line(axis, timed, _ALONG, _SPEED, method=method, label=method)
    last = timed.iloc[-1]
    beyond = options[options[_ALONG] > last[_ALONG]]
    if len(beyond) and beyond["too_large"].iloc[0]:
        axis.plot(last[_ALONG], last[_SPEED], **_CROSS)


def _name_lines(axis: Axes) -> None:
    to_axes = axis.transData + axis.transAxes.inverted()
    ends = [end for end in ends_of(axis) if end[2] != _CROSS["label"]]
    for length in {x for x, _, _ in ends}:
        edge = float(to_axes.transform((length, 0))[0])
        label_ends(axis, [end for end in ends if end[0] == length], edge)
    for text in axis.texts:  # inside the axes some cross a line
        text.set_path_effects([withStroke(linewidth=2, foreground="white")])
