import pandas as pd
from factory import make_experiment

from dpprof.figures import tradeoff
from dpprof.figures.style import method_style
from dpprof.spec import registry


def draw(experiments: pd.DataFrame):
    return tradeoff.draw({"experiments": experiments})


def experiments(**changes) -> pd.DataFrame:
    rows = [
        {
            **make_experiment(seq_len=8, method=method, batch_size=batch).model_dump(),
            "model": model,
            "parameters_total": {"tiny": 10, "small": 100}[model],
            "median_step_s": batch * 0.01,
            "step_low_s": batch * 0.009,
            "step_high_s": batch * 0.012,
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
        "small, T = 8",
        "tiny, T = 8",
    ]
    assert {axis.get_xlabel() for axis in axes} == {"step time (ms)"}
    assert {axis.get_ylabel() for axis in axes} == {"peak RSS (MiB)"}


def test_points_stand_where_the_table_says() -> None:
    axis = draw(experiments()).axes[0]
    lines = [line for line in axis.lines if len(line.get_xdata()) == 2]

    assert [list(line.get_xdata()) for line in lines] == [[20.0, 40.0]] * 2
    assert [list(line.get_ydata()) for line in lines] == [[2.0, 4.0]] * 2


def test_what_else_differs_has_a_panel_of_its_own_and_is_named() -> None:
    both = pd.concat([experiments(), experiments(dtype="float64", noise_multiplier=2.0)])

    assert sorted(axis.get_title().replace("\n", " ") for axis in draw(both).axes) == [
        "small, T = 8, dtype = float32, noise_multiplier = 1.0",
        "small, T = 8, dtype = float64, noise_multiplier = 2.0",
        "tiny, T = 8, dtype = float32, noise_multiplier = 1.0",
        "tiny, T = 8, dtype = float64, noise_multiplier = 2.0",
    ]


def test_a_method_keeps_its_look_and_own_methods_differ() -> None:
    names = registry.names("methods")
    colours = {method_style(name)["color"] for name in names}
    markers = {method_style(name)["marker"] for name in names}

    assert len(colours) == len(markers) == len(names)
    assert method_style("from-elsewhere") == method_style("from-elsewhere")
