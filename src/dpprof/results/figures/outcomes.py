"""Which methods succeeded, and how did the others fail?"""

from collections.abc import Mapping

import pandas as pd
from matplotlib.figure import Figure

from dpprof.results.figures.bars import share_legend, stack
from dpprof.results.figures.style import (
    OUTCOME_COLOURS,
    NothingToDrawError,
    new_figure,
    sort_methods,
)


def draw(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """Number of runs by method and outcome."""
    outcomes = tables["outcomes"].set_index("method")
    if outcomes.empty:
        raise NothingToDrawError("no run was planned")
    counts = outcomes.loc[sort_methods(outcomes.index), [*OUTCOME_COLOURS, "missing"]]
    figure, axes = new_figure(row_inches=0.9 + 0.2 * len(counts))
    colours = {**OUTCOME_COLOURS, "missing": "#FFFFFF"}
    stack(axes[0, 0], counts, colours)
    axes[0, 0].set_xlabel("runs")
    axes[0, 0].xaxis.get_major_locator().set_params(integer=True)
    share_legend(figure, colours)
    return figure
