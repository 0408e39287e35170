"""What is said of capacities and of a privacy budget is what their tables say."""

import pandas as pd
import pytest
from snapshots import assert_reviewed

from dpprof.results.report.rendering.document import Table
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


OPTIONS = [
    OPTION | {"method": "a", "verdict": "first"},
    OPTION | {"method": "b", "verdict": "slower", "limited_by": "search"},
    OPTION | without(OPTION, "dtype", "budget_bytes") | {"method": "e", "verdict": "does not fit"},
]
BROKEN = without(COST, "epsilon", "batch_size", "noise_multiplier") | {"message": "it broke"}
COSTS = [
    COST | {"method": "flash-bk"},
    COST | BROKEN | {"method": "flash"},
    COST | {"method": "standard", "epsilon": None, "noise_multiplier": None},
]
WHY = {"method": None, "message": "no noise is known: it took too long"}
TOLD = {
    "capacities": lambda: tell_capacity(pd.DataFrame(OPTIONS)),
    "costs": lambda: tell_budget(noise(), pd.DataFrame(COSTS)),
    "a price": lambda: tell_budget(
        noise(), pd.DataFrame([COST | {"method": "flash", "price": 432.1}])
    ),
    "no noise": lambda: tell_budget(noise().iloc[:0], pd.DataFrame([dict.fromkeys(COST) | WHY])),
}


@pytest.mark.parametrize("name", TOLD)
def test_capacities_noise_hours_and_what_needs_care_read_as_they_were_reviewed(name) -> None:
    lines = []
    for block in TOLD[name]():
        if isinstance(block, Table):
            lines += [" | ".join(row) for row in (block.header, *block.rows)]
        lines += [*getattr(block, "items", ()), getattr(block, "caption", ""), ""]

    assert_reviewed(f"report/told - {name}", "\n".join(lines))
