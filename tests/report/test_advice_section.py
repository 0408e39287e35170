"""What is advised is what the table says."""

import pandas as pd

from dpprof.results.report.sections.memory import tell_capacity

SETTING = {"model": "1b", "seq_len": 1024, "dtype": "float32", "target": "h200"}
SETTING |= {"lora": None, "trainable": None, "parallel": None}


def make(*options: dict[str, object], **setting) -> pd.DataFrame:
    usual = {
        "budget_bytes": 139 * 2**30,
        "largest_batch_size": 21,
        "largest_peak_bytes": 130 * 2**30,
        "safe_batch_size": 19,
        "tokens_per_s": 5731.4,
        "tokens_per_s_low": 5000.0,
        "tokens_per_s_high": 6500.2,
        "dp_flop_multiplier": 1.3214,
        "limited_by": "memory",
        "message": None,
    }
    return pd.DataFrame([SETTING | setting | usual | option for option in options])


NOTHING = dict.fromkeys(
    ["largest_batch_size", "largest_peak_bytes", "safe_batch_size", "tokens_per_s"]
) | {
    "tokens_per_s_low": None,
    "tokens_per_s_high": None,
    "dp_flop_multiplier": None,
    "limited_by": None,
}


def test_the_table_has_a_row_an_option() -> None:
    table = make(
        {"method": "a", "verdict": "first"},
        {"method": "b", "verdict": "slower", "limited_by": "search"},
        {"method": "e", "verdict": "does not fit"} | NOTHING,
    )
    [told] = tell_capacity(table)
    rows = [dict(zip(told.header, row, strict=True)) for row in told.rows]

    assert rows[0]["largest batch"] == "21"
    assert rows[0]["its peak (GiB)"] == "130.0"
    assert rows[0]["tokens/s"] == "5,731"
    assert rows[0]["90 % interval"] == "5,000 to 6,500"
    assert rows[1]["largest batch"] == "21+"
    assert rows[2] == rows[2] | {"method": "e", "largest batch": "-", "safe batch": "-"}
    assert "h200 139.0 GiB" in told.caption


def test_nothing_is_said_where_nobody_asked() -> None:
    assert tell_capacity(make({"method": "a"}).iloc[:0]) == []
