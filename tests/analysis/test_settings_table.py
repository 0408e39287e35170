"""Which method is smallest and which fastest, and what cannot be told."""

import pandas as pd
import pytest
from factory import make_experiment, tables_of_runs

STANDARD = make_experiment(method="standard")
GHOST = make_experiment(method="opacus-ghost")
HOOKS = make_experiment(method="opacus-hooks")
EW = make_experiment(method="opacus-ew")


def tables_of(root, times, peaks=None):
    """Build tables of step times and allocator's peaks, by experiment."""
    runs = [
        (experiment, "clean", {"replicate": number, "step_s": (step_s,)} | peak)
        for experiment, seconds in times.items()
        for peak in [{"peak_allocated_bytes": (peaks or {}).get(experiment)}]
        for number, step_s in enumerate(seconds)
    ]
    return tables_of_runs(root, *runs)


def only_row(root, times, peaks=None):
    [row] = tables_of(root, times, peaks)["settings"].to_dict("records")
    return row


def test_smallest_fastest_and_their_ratios(tmp_path) -> None:
    times = {
        STANDARD: [1.0, 1.01, 0.99],
        GHOST: [3.0, 3.01, 2.99],
        HOOKS: [2.0, 2.01, 1.99],
        EW: [2.02, 2.0, 2.01],
    }
    row = only_row(tmp_path, times, {STANDARD: 100, GHOST: 150, HOOKS: 400, EW: 401})

    assert (row["methods"], row["noise_known"]) == (3, True)
    smallest = [row[name] for name in ("smallest", "smallest_peak_bytes", "smallest_ratio")]
    assert smallest == ["opacus-ghost", 150, 1.5]
    fastest = [row[name] for name in ("fastest", "fastest_step_s", "fastest_ratio")]
    assert fastest == ["opacus-hooks", 2.0, 2.0]
    assert row["not_slower"] == "opacus-ew"
    assert row["fastest_ratio_low"] < 2.0 < row["fastest_ratio_high"]
    assert row["fastest_verdict"] == "larger"


def test_peaks_of_two_kinds_have_no_smallest(tmp_path) -> None:
    row = only_row(tmp_path, {GHOST: [3.0], HOOKS: [2.0]}, {GHOST: 10})

    assert pd.isna(row["smallest"])
    assert row["fastest"] == "opacus-hooks"


def test_every_setting_has_a_row_and_methods_are_reduced_over_them(tmp_path) -> None:
    other = [make_experiment(method=m, batch_size=9) for m in ("standard", "opacus-ghost")]
    times = {STANDARD: [1.0], GHOST: [3.0], other[0]: [1.0], other[1]: [4.0]}
    tables = tables_of(tmp_path, times, {STANDARD: 10, GHOST: 20})
    settings, ghost = tables["settings"], tables["methods"].set_index("method").loc["opacus-ghost"]

    ratios = dict(zip(settings["batch_size"], settings["fastest_ratio"], strict=True))
    assert ratios == {2: 3.0, 9: 4.0}
    assert (ghost["experiments"], ghost["step_ratio_count"]) == (2, 2)
    steps = ghost[[f"step_ratio_{name}" for name in ("min", "median", "max")]]
    assert steps.tolist() == [3.0, 3.5, 4.0]
    assert ghost["peak_ratio_median"] == pytest.approx(2.0)
