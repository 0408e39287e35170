"""Which methods succeeded, and how did the others fail?"""

from collections.abc import Mapping

import pandas as pd
from matplotlib.figure import Figure

from dpprof.results.figures import style
from dpprof.results.figures.bars import share_legend, stack


def draw(tables: Mapping[str, pd.DataFrame]) -> Figure:
    """Number of runs by method and outcome."""
    outcomes = tables["outcomes"].set_index("method")
    if outcomes.empty:
        raise style.NothingToDrawError("no run was planned")
    counts = outcomes.loc[style.sort_methods(outcomes.index), [*style.OUTCOME_COLOURS, "missing"]]
    figure, axes = style.new_figure(row_inches=0.9 + 0.2 * len(counts))
    colours = {**style.OUTCOME_COLOURS, "missing": "#FFFFFF"}
    stack(axes[0, 0], counts, colours)
    axes[0, 0].set_xlabel("runs")
    axes[0, 0].xaxis.get_major_locator().set_params(integer=True)
    share_legend(figure, colours)
    return figure
