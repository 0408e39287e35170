"""Are predictions right on this machine?"""

from collections.abc import Mapping

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpprof.results.analysis.selection import find_agreement
from dpprof.results.figures.bars import height_of, name_bars
from dpprof.results.figures.panels import split
from dpprof.results.figures.style import NothingToDrawError, new_figure, tell

_MIB = 2**20
_PREDICTED, _MEASURED = "#888888", "#0072B2"


def draw(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """Predicted and measured peak memory and step time, where both are known.

    The measured peak is the allocator's, of another process. Lines are the 90 % interval of the
    predicted time, and the 95 % interval of the measured one over processes.
    """
    experiments = find_agreement(tables)
    if experiments.empty:
        raise NothingToDrawError(
            "no experiment was both predicted for this machine and measured on it"
        )
    panel = split(experiments, "", most=1).shown[0]
    rows = panel.sorted_by(panel.rows["predicted_bytes"].astype(float))
    figure, axes = new_figure(2, row_inches=height_of(round(1.4 * len(rows))))
    memory, time = axes[0]
    names = list(map(str, rows.index))
    for axis, unit, pairs in (
        (memory, _MIB, ("predicted_bytes", "measured_bytes")),
        (time, 1e-3, ("predicted_step_s", "median_step_s")),
    ):
        for name, offset, colour in zip(pairs, (-0.2, 0.2), (_PREDICTED, _MEASURED), strict=True):
            places = [row + offset for row in range(len(rows))]
            axis.barh(places, rows[name].astype(float) / unit, height=0.36, color=colour)
        name_bars(axis, names if axis is memory else [""] * len(rows))
    _span(time, rows, ("predicted_step_low_s", "predicted_step_high_s"), -0.2)
    _span(time, rows, ("step_low_s", "step_high_s"), 0.2)
    memory.set_xlabel("peak memory (MiB)")
    time.set_xlabel("step time (ms)")
    memory.set_title(panel.title)
    time.set_title("grey: predicted, blue: measured")
    tell(figure, say_agreement(experiments))
    return figure


def _span(axis: Axes, rows: pd.DataFrame, ends: tuple[str, str], offset: float) -> None:
    low, high = (rows[name].astype(float) * 1e3 for name in ends)
    axis.hlines([row + offset for row in range(len(rows))], low, high, color="black", linewidth=1)


def say_agreement(experiments: pd.DataFrame) -> str:
    """Return how near predictions are to what was measured; empty where nothing was both."""
    memory = experiments.dropna(subset=["predicted_bytes", "measured_bytes"])
    time = experiments.dropna(subset=["predicted_step_s", "median_step_s"])
    said = []
    if len(memory):
        gaps = (memory["predicted_bytes"] - memory["measured_bytes"]).abs().astype(float)
        exact = int((gaps == 0).sum())
        off = "" if exact == len(memory) else f"; the largest gap is {gaps.max():,.0f} bytes"
        said.append(f"{exact:,} of {len(memory):,} predicted memory peaks are exact{off}.")
    if len(time):
        ratio = (time["median_step_s"] / time["predicted_step_s"]).astype(float)
        inside = time["median_step_s"].between(
            time["predicted_step_low_s"], time["predicted_step_high_s"]
        )
        said.append(
            f"steps take {ratio.min():.2f} to {ratio.max():.2f} times the "
            f"predicted time; {int(inside.sum()):,} of {len(time):,} step times are inside the "
            "predicted 90 % interval."
        )
    return " ".join(f"On this machine {sentence}" for sentence in said)
