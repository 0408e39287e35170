"""What a budget costs, in the report."""

import pandas as pd

from dpprof.results.report.sections.budget import tell_budget

NOISE = {
    "samples": 1_000_000,
    "tokens": 2_000_000_000,
    "epsilon": 8.0,
    "delta": 1e-7,
    "accountant": "prv",
    "tokens_per_sample": 1024.0,
}
COST = {
    "model": "1b",
    "seq_len": 1024,
    "target": "h200",
    "steps": 1908,
    "noise_multiplier": 0.4483,
    "same_batch_noise_multiplier": 0.4483,
    "batch_size": 1024,
    "micro_batch_size": 19,
    "accumulation_steps": 54,
    "gpu_hours": 123.456,
    "gpu_hours_low": 100.0,
    "gpu_hours_high": 150.0,
    "price": None,
    "hours_ratio": 1.234,
    "message": None,
}
NOTHING = dict.fromkeys(
    ["accumulation_steps", "micro_batch_size", "gpu_hours", "gpu_hours_low", "gpu_hours_high"]
) | {"hours_ratio": None}


def noise() -> pd.DataFrame:
    rows = [
        {"batch_size": 512, "steps": 3815, "noise_multiplier": None, "chosen": False},
        {"batch_size": 1024, "steps": 1908, "noise_multiplier": 0.4483, "chosen": True},
    ]
    figures = {"sample_rate": 0.001024, "step_noise": 4.378e-4, "training_noise": 1.0024e-5}
    return pd.DataFrame([NOISE | figures | row for row in rows])


def table(told) -> list[dict[str, str]]:
    return [dict(zip(told.header, row, strict=True)) for row in told.rows]


def test_noise_then_hours_then_what_needs_care() -> None:
    budget = pd.DataFrame(
        [
            COST | {"method": "flash-bk", "epsilon": 8.0},
            COST | {"method": "flash", "epsilon": 8.0, "message": "it broke"} | NOTHING,
            COST | {"method": "standard", "epsilon": None, "noise_multiplier": None},
        ]
    )
    noises, hours, care = tell_budget(noise(), budget)

    assert [row["used"] for row in table(noises)] == ["", "yes"]
    assert table(noises)[1]["of the training"] == "10.0"
    assert table(noises)[0]["noise multiplier"] == "-"
    assert "(8, 1e-07)-differential privacy asks for, by the accountant prv" in noises.caption
    assert "which are 1.95 times the data" in noises.caption
    first, broken, plain = table(hours)
    assert first["GPU hours"] == "123"
    assert first["90 % interval"] == "100 to 150"
    assert first["micro-batches"] == "54 x 19"
    assert (broken["GPU hours"], broken["90 % interval"]) == ("-", "-")
    assert (plain["epsilon"], plain["noise multiplier"]) == ("none", "-")
    assert "price" not in hours.header
    assert care.items == ("flash: it broke.",)


def test_a_price_has_its_column() -> None:
    budget = pd.DataFrame([COST | {"method": "flash", "epsilon": 8.0, "price": 432.1}])

    assert table(tell_budget(noise(), budget)[1])[0]["price"] == "432"


def test_hours_that_nobody_could_tell_have_their_reason() -> None:
    known = {"method": None, "message": "no noise is known: it took too long"}
    budget = pd.DataFrame([dict.fromkeys(COST) | known])
    nothing = noise().iloc[:0]

    [care] = tell_budget(nothing, budget)

    assert care.items == ("no noise is known: it took too long.",)


def test_without_a_budget_there_is_no_section() -> None:
    assert tell_budget(noise().iloc[:0], pd.DataFrame()) == []
