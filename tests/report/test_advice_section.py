"""What is advised is what the table says."""

import pandas as pd

from dpprof.report.advice_section import tell_advice, tell_capacity

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


def test_the_sentence_names_what_is_first_close_and_beyond() -> None:
    table = make(
        {"method": "a", "verdict": "first"},
        {"method": "b", "verdict": "close"},
        {"method": "c", "verdict": "close"},
        {"method": "d", "verdict": "slower"},
        {"method": "e", "verdict": "does not fit"} | NOTHING,
    )

    [bullets] = tell_advice(table)
    [sentence] = bullets.items

    assert sentence == (
        "On h200, a is predicted to be the fastest private method for 1b at 1,024 tokens in "
        "float32, at 5,731 tokens/s; batches of 19 safely fit; no difference is predicted between "
        "it and b and c; e does not fit at all."
    )


def test_adapters_and_whole_training_are_told_apart() -> None:
    table = pd.concat(
        [
            make({"method": "a", "verdict": "first"}, lora="rank 16, alpha 32"),
            make({"method": "b", "verdict": "first"}),
            make({"method": "c", "verdict": "first"}, trainable="bias"),
        ]
    )

    [bullets] = tell_advice(table)

    assert [sentence.partition(" for ")[2].partition(" at ")[0] for sentence in bullets.items] == [
        "1b with LoRA (rank 16, alpha 32)",
        "1b",
        "1b, training bias",
    ]


def test_every_setting_has_its_sentence() -> None:
    table = pd.concat(
        [
            make({"method": "a", "verdict": "first"}),
            make({"method": "a", "verdict": "does not fit"} | NOTHING, target="l4"),
        ]
    )

    assert tell_advice(table)[0].items[1] == (
        "No requested private method safely fits on l4 for 1b at 1,024 tokens in float32."
    )


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
    nothing = make().reindex(columns=[*SETTING])

    assert tell_capacity(nothing) == tell_advice(nothing) == []


def test_without_a_predicted_time_nothing_is_said_to_be_beyond() -> None:
    table = make({"method": "a", "verdict": "unranked", "tokens_per_s": None}, target=None)

    [sentence] = tell_advice(table)[0].items

    assert sentence.startswith("No time is predicted on this machine, so methods for 1b")


def test_what_failed_verification_is_said_whether_something_else_is_advised_or_not() -> None:
    wrong = {"method": "w", "verdict": "wrong", "message": "its gradient is wrong"}
    [with_best] = tell_advice(make({"method": "a", "verdict": "first"}, wrong))[0].items
    [without] = tell_advice(make(wrong))[0].items

    assert with_best.endswith("; batches of 19 safely fit; w failed verification.")
    assert without == (
        "No requested private method safely fits on h200 for 1b at 1,024 tokens in float32; "
        "w failed verification."
    )
