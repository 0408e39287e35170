"""What is said of capacities and of a privacy budget is what their tables say."""

import pandas as pd

from dpprof.results.report.sections.memory import tell_budget, tell_capacity

OPTION = {"model": "1b", "seq_len": 1024, "dtype": "float32", "target": "h200"}
OPTION |= {"lora": None, "trainable": None, "parallel": None}
OPTION |= {"budget_bytes": 139 * 2**30, "largest_peak_bytes": 130 * 2**30}
OPTION |= {"largest_batch_size": 21, "safe_batch_size": 19, "limited_by": "memory"}
OPTION |= {"tokens_per_s": 5731.4, "tokens_per_s_low": 5000.0, "tokens_per_s_high": 6500.2}
OPTION |= {"dp_flop_multiplier": 1.3214, "message": None}
NOISE = {"samples": 1_000_000, "tokens": 2_000_000_000, "tokens_per_sample": 1024.0}
NOISE |= {"epsilon": 8.0, "delta": 1e-7, "accountant": "prv"}
NOISE |= {"sample_rate": 0.001024, "step_noise": 4.378e-4, "training_noise": 1.0024e-5}
COST = {"model": "1b", "seq_len": 1024, "target": "h200", "steps": 1908, "batch_size": 1024}
COST |= {"noise_multiplier": 0.4483, "same_batch_noise_multiplier": 0.4483, "epsilon": 8.0}
COST |= {"micro_batch_size": 19, "accumulation_steps": 54, "price": None, "message": None}
COST |= {"gpu_hours": 123.456, "gpu_hours_low": 100.0, "gpu_hours_high": 150.0}
COST |= {"hours_ratio": 1.234}


def without(row, *kept) -> dict[str, None]:
    """The figures of a row, but for what is kept, as unknown."""
    return dict.fromkeys(row.keys() - {"model", "seq_len", "target", *kept})


def noise() -> pd.DataFrame:
    rows = [
        {"batch_size": 512, "steps": 3815, "noise_multiplier": None, "chosen": False},
        {"batch_size": 1024, "steps": 1908, "noise_multiplier": 0.4483, "chosen": True},
    ]
    return pd.DataFrame([NOISE | row for row in rows])


def table(told) -> list[dict[str, str]]:
    return [dict(zip(told.header, row, strict=True)) for row in told.rows]


def test_the_table_of_capacities_has_a_row_an_option() -> None:
    options = [
        OPTION | {"method": "a", "verdict": "first"},
        OPTION | {"method": "b", "verdict": "slower", "limited_by": "search"},
        OPTION
        | without(OPTION, "dtype", "budget_bytes")
        | {"method": "e", "verdict": "does not fit"},
    ]
    [told] = tell_capacity(pd.DataFrame(options))
    first, second, third = table(told)

    assert first["largest batch"] == "21"
    assert first["its peak (GiB)"] == "130.0"
    assert first["tokens/s"] == "5,731"
    assert first["90 % interval"] == "5,000 to 6,500"
    assert second["largest batch"] == "21+"
    assert third == third | {"method": "e", "largest batch": "-", "safe batch": "-"}
    assert "h200 139.0 GiB" in told.caption


def test_noise_then_hours_then_what_needs_care() -> None:
    broken = without(COST, "epsilon", "batch_size", "noise_multiplier") | {"message": "it broke"}
    budget = [
        COST | {"method": "flash-bk"},
        COST | broken | {"method": "flash"},
        COST | {"method": "standard", "epsilon": None, "noise_multiplier": None},
    ]
    noises, hours, care = tell_budget(noise(), pd.DataFrame(budget))

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
    budget = pd.DataFrame([COST | {"method": "flash", "price": 432.1}])

    assert table(tell_budget(noise(), budget)[1])[0]["price"] == "432"


def test_hours_that_nobody_could_tell_have_their_reason() -> None:
    why = {"method": None, "message": "no noise is known: it took too long"}
    budget = pd.DataFrame([dict.fromkeys(COST) | why])
    [care] = tell_budget(noise().iloc[:0], budget)

    assert care.items == ("no noise is known: it took too long.",)
