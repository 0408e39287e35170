import pandas as pd
import pytest
from factory import make_experiment, tables_of_runs

from dpprof.experiments.config import registry
from dpprof.results.figures import tradeoff
from dpprof.results.figures.style import method_style

MIB = 2**20
METHODS = {"standard": (0.010, 2), "opacus-ghost": (0.025, 3), "flash-bk": (0.012, 2)}


def tables_of(root, methods=METHODS, replicates=1, **fields):
    runs = []
    for method, (seconds, mib) in methods.items():
        for number in range(replicates):
            measured = {"step_s": (seconds * (1 + number / 100),), "replicate": number}
            measured |= {"peak_allocated_bytes": mib * MIB}
            runs.append((make_experiment(method=method, **fields), "clean", measured))
    return tables_of_runs(root, *runs)


def points_of(axis) -> dict[str, tuple[float, float]]:
    return {text.get_text(): tuple(text.xy) for text in axis.texts}


RATIOS = {"standard": (1.0, 1.0), "opacus-ghost": (2.5, 1.5), "flash-bk": (1.2, 1.0)}
OWN_UNITS = {"opacus-ghost": (25.0, 3.0), "flash-bk": (12.0, 2.0)}


@pytest.mark.parametrize(
    ("points", "time", "memory"),
    [(RATIOS, "times standard", "times standard"), (OWN_UNITS, "ms", "MiB")],
)
def test_points_are_named_multiples_of_standard_if_it_is_there(
    points, time, memory, tmp_path
) -> None:
    methods = {name: METHODS[name] for name in points}
    [axis] = tradeoff.draw(tables_of(tmp_path, methods)).axes

    assert points_of(axis) == {name: pytest.approx(point) for name, point in points.items()}
    assert axis.get_title() == "V16-d8-L1-H2, T = 4, B = 2"
    labels = axis.get_xlabel(), axis.get_ylabel()
    assert labels == (f"step time ({time})", f"peak allocated ({memory})")


def test_error_bars_are_the_intervals_of_the_ratios(tmp_path) -> None:
    tables = tables_of(tmp_path, replicates=3)
    [axis] = tradeoff.draw(tables).axes
    ends = {
        tuple(round(float(x), 6) for x in segment[:, 0])
        for container in axis.containers
        for bars in container.lines[2]
        for segment in bars.get_segments()
        if len(segment)
    }

    # Three processes: from the fastest over standard's slowest, to the slowest over its fastest.
    assert ends == {
        (round(2.5 / 1.02, 6), round(2.5 * 1.02, 6)),
        (round(1.2 / 1.02, 6), round(1.2 * 1.02, 6)),
    }


def test_of_several_settings_the_one_with_most_methods_is_drawn(tmp_path) -> None:
    few = {name: METHODS[name] for name in ("standard", "flash-bk")}
    more, fewer = tables_of(tmp_path, seq_len=8), tables_of(tmp_path, few, seq_len=16)
    both = pd.concat([fewer["experiments"], more["experiments"]], ignore_index=True)
    [axis] = tradeoff.draw({"experiments": both}).axes

    assert axis.get_title() == "V16-d8-L1-H2, T = 8, B = 2"
    assert len(axis.texts) == 3


def test_a_method_keeps_its_look_and_own_methods_differ() -> None:
    names = registry.names("methods")
    colours = {method_style(name)["color"] for name in names}
    markers = {method_style(name)["marker"] for name in names}

    assert len(colours) == len(markers) == len(names)
    assert method_style("from-elsewhere") == method_style("from-elsewhere")
