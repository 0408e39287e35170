import pandas as pd
import pytest

from dpprof.figures.style import method_style
from dpprof.figures.tradeoff import draw


def experiments(**changes) -> pd.DataFrame:
    rows = [
        {
            "model": model,
            "seq_len": 8,
            "dtype": "float32",
            "method": method,
            "batch_size": batch,
            "median_step_s": batch * 0.01,
            "min_step_s": batch * 0.009,
            "max_step_s": batch * 0.012,
            "peak_kind": "rss",
            "peak_bytes": batch * 2**20,
            "peak_min_bytes": batch * 2**20,
            "peak_max_bytes": batch * 2**20,
        }
        | changes
        for model in ("tiny", "small")
        for method in ("standard", "opacus-ghost")
        for batch in (2, 4)
    ]
    return pd.DataFrame(rows)


def test_a_panel_per_model_with_units_on_its_axes() -> None:
    axes = draw(experiments()).axes

    assert sorted(axis.get_title() for axis in axes) == [
        "small, T = 8, float32",
        "tiny, T = 8, float32",
    ]
    assert {axis.get_xlabel() for axis in axes} == {"step time (ms)"}
    assert {axis.get_ylabel() for axis in axes} == {"peak RSS (MiB)"}


def test_points_stand_where_the_table_says() -> None:
    axis = draw(experiments()).axes[0]
    lines = [line for line in axis.lines if len(line.get_xdata()) == 2]

    assert [list(line.get_xdata()) for line in lines] == [[20.0, 40.0]] * 2
    assert [list(line.get_ydata()) for line in lines] == [[2.0, 4.0]] * 2


@pytest.mark.parametrize("column", ["median_step_s", "peak_bytes"])
def test_nothing_to_draw_is_said(column: str) -> None:
    figure = draw(experiments(**{column: float("nan")}))

    assert "nothing to draw" in figure.axes[0].texts[0].get_text()


def test_an_empty_table_is_said() -> None:
    assert "nothing to draw" in draw(experiments().head(0)).axes[0].texts[0].get_text()


def test_a_method_keeps_its_look_and_own_methods_differ() -> None:
    looks = [
        tuple(method_style(name).values())
        for name in ("standard", "microbatch", "opacus-hooks", "opacus-ghost")
    ]

    assert len(set(looks)) == 4
    assert method_style("from-elsewhere") == method_style("from-elsewhere")
