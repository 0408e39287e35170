"""The sentences above a section's figures compare like with like."""

import pandas as pd

from dpprof.analysis.tables.axes import SETTING
from dpprof.report.leads import tell_growth, tell_kernels, tell_price


def row(method: str, **fields: object) -> dict[str, object]:
    known = {"model": "small", "seq_len": 128, "batch_size": 4, "dtype": "float32", "target": None}
    return dict.fromkeys(SETTING) | known | {"parameters_total": 7e6, "method": method} | fields


def test_a_step_grows_within_one_dtype() -> None:
    rows = [
        row("standard", seq_len=64, median_step_s=1.0, dtype="bfloat16"),
        row("standard", seq_len=64, median_step_s=2.0),
        row("standard", seq_len=256, median_step_s=8.0),
        row("standard", seq_len=1024, median_step_s=99.0, dtype="float16"),
        row("flash", seq_len=64, median_step_s=3.0),
        row("flash", seq_len=256, median_step_s=15.0),
    ]
    [told] = tell_growth(pd.DataFrame(rows))

    [said] = told.items
    assert said == (
        "From T = 64 to 256, 4 times the tokens, a step of small at B = 4 takes 4.00 times with "
        "standard and 5.00 times with flash."
    )


def test_sizes_of_two_dtypes_are_no_growth() -> None:
    rows = [
        row("standard", seq_len=64, median_step_s=1.0, dtype="bfloat16"),
        row("standard", seq_len=256, median_step_s=8.0),
    ]
    assert tell_growth(pd.DataFrame(rows)) == []


def test_kernels_are_told_of_one_setting() -> None:
    traces = pd.DataFrame(
        [
            row("standard", experiment_id="a", replicate=0, step_s=1.0, idle_s=0.1),
            row("flash", experiment_id="b", replicate=0, step_s=2.0, idle_s=0.2),
            row("ew", experiment_id="c", replicate=0, step_s=9.0, idle_s=9.0, dtype="bfloat16"),
        ]
    )
    kernels = pd.DataFrame(
        {"experiment_id": list("abc"), "replicate": 0, "op_kind": "matmul", "seconds": 0.5}
    )
    [told] = tell_kernels(kernels, traces)

    [said] = told.items
    assert said == (
        "In a traced step of small (T = 128, B = 4), most time goes to matmul with standard and "
        "flash (25% to 50%); nothing runs in 10% of it."
    )


def cost(method: str, epsilon: float | None, hours: float | None, **fields: object):
    return row(method, epsilon=epsilon, gpu_hours=hours, target="h200") | fields


def test_the_cheapest_method_is_known_at_every_epsilon_and_of_one_dtype() -> None:
    rows = [
        cost("flash", 8, 10.0),
        cost("flash", 2, 40.0),
        cost("opacus-ghost", 8, 11.0),
        cost("opacus-ghost", 2, None),
        cost("flash-bk", 8, 12.0),
        cost("flash-bk", 2, 20.0),
        cost("standard", None, 1.0),
        cost("flash", 8, 0.1, dtype="bfloat16"),
        cost("flash", 2, 0.1, dtype="bfloat16", parameters_total=6e6),
    ]
    [told] = tell_price(pd.DataFrame(rows))

    [said] = told.items
    assert said == (
        "GPU hours of the whole training of small on h200 with flash-bk, by epsilon: 12.0 at 8 and "
        "20.0 at 2; predicted."
    )


def test_without_gpu_hours_nothing_is_told() -> None:
    assert tell_price(pd.DataFrame([cost("flash", 8, None)])) == []
