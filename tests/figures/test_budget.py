"""Hours over epsilon, beside training without privacy."""

import pytest
from factory import (
    PRIVACY,
    make_capacity,
    make_experiment,
    make_noise,
    tables_of_runs,
    write_synthetic_verdict,
)

from dpprof.results.analysis.advice.budget import Planned
from dpprof.results.figures.prices import draw_budget as draw


def test_each_panel_has_plain_training_of_its_own_setting(tmp_path) -> None:
    runs = [
        (
            make_experiment(
                method=method, checkpointing=way, seq_len=8, device="cuda", target="h200"
            ),
            "capacity",
            {"recorded": make_capacity(step_s)},
        )
        for way, step_s in (("none", 1.0), ("reentrant", 1.5))
        for method in ("standard", "flash-bk")
    ]
    planned = Planned(PRIVACY, {8.0: make_noise(8.0)})
    figure = draw(tables_of_runs(tmp_path, *runs, planned=planned))

    plain = [
        [line.get_ydata()[0] for line in axis.lines if line.get_linestyle() == "--"]
        for axis in figure.axes
    ]
    # 100 steps of 64 samples: eight batches of 8 without noise and optimizer, and those once.
    assert plain == [[pytest.approx(s * 100 * 6.6 / 3600)] for s in (1.0, 1.5)]


def test_the_sentence_names_its_training_and_no_wrong_method(tmp_path) -> None:
    runs = [
        (
            make_experiment(method=method, seq_len=length, device="cuda", target="h200"),
            "capacity",
            {"recorded": make_capacity(step_s)},
        )
        for length in (8, 16)
        for method, step_s in (("opacus-ghost", 0.5), ("flash-bk", 1.0))
    ]
    write_synthetic_verdict(tmp_path, runs[0][0], passed=False, reason="wrong")
    noise = {float(length): make_noise(float(length)) for length in (8, 16)}
    figure = draw(tables_of_runs(tmp_path, *runs, planned=Planned(PRIVACY, noise)))

    said = figure.get_label()
    assert said.startswith("A smaller epsilon needs more samples a step: epsilon 2 takes ")
    assert said.endswith(" the hours of epsilon 8 (flash-bk, V16-d8-L1-H2, T = 8 on h200).")
