"""Figures of more points than a reader can tell apart."""

import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.container import ErrorbarContainer

from dpprof.results.figures.scaling import draw_batch_size


def experiments_of(count: int) -> pd.DataFrame:
    """Experiments of two methods along the batch size, with intervals."""
    batches = np.arange(1, count + 1)
    tables = [
        pd.DataFrame({"method": method, "batch_size": batches}).assign(
            median_step_s=0.01 * rank * batches,
            step_low_s=0.009 * rank * batches,
            step_high_s=0.011 * rank * batches,
            peak_bytes=2**20 * batches,
        )
        for rank, method in enumerate(("standard", "flash"), 1)
    ]
    setting = {"model": "tiny", "seq_len": 32, "parameters_total": 10, "peak_kind": "allocated"}
    return pd.concat(tables, ignore_index=True).assign(**setting)


def time_axis(count: int):
    return draw_batch_size({"experiments": experiments_of(count)}).axes[1]


def test_few_points_keep_marks_and_error_bars() -> None:
    axis = time_axis(16)

    assert [kind for kind in axis.containers if isinstance(kind, ErrorbarContainer)]
    assert not [one for one in axis.collections if isinstance(one, PolyCollection)]
    assert all(line.get_markevery() is None for line in axis.lines)


def test_many_points_are_lines_with_eight_marks_and_one_band_a_method() -> None:
    axis = time_axis(1_000)

    assert not axis.containers
    bands = [one for one in axis.collections if isinstance(one, PolyCollection)]
    assert len(bands) == 2
    (standard,) = [line for line in axis.lines if line.get_label() == "standard"]
    assert len(standard.get_xdata()) == 1_000
    # 1,000 ** (k / 7) for k from 0 to 7, less one for the position.
    assert standard.get_markevery() == [0, 2, 6, 18, 51, 138, 372, 999]
    # The highest ends of the methods' intervals, in milliseconds.
    highest = [band.get_paths()[0].vertices[:, 1].max() for band in bands]
    assert sorted(highest) == pytest.approx([11_000, 22_000])
