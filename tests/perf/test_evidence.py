"""What was copied into evidence.csv: all of it, and consistent with itself."""

import csv
from collections import Counter

import pytest
from published.cases import Case

from dpprof.experiments.config.experiment import Experiment
from evidence import DATA, MODELS, NOT_RECREATED, PAGES, SOURCES, find_target, read_rows
from predictions import KERNELS

STEPS, RANKS, PRIVATE, MEASURED = (read_rows(page) for page in PAGES)
CASES = read_rows("validation")
ROWS = [*STEPS, *RANKS, *PRIVATE, *MEASURED, *CASES]
OF_STEPS = {"gpus", "batch_size", "seq_len", "accumulation", "checkpointing", "compiled"}
OF_STEPS |= {"attention", "parameters"}
SETTINGS = {
    "step_time": OF_STEPS | {"label", "dtype", "program", "mfu"},
    "ranks": OF_STEPS | {"nodes", "network_gb_per_s", "lora", "sharding", "prefetch", "reduce"},
    "private_runs": {"batch_size", "size", "steps"},
    "measured_steps": {*Experiment.model_fields},
    "validation": {*Case._fields},
}
UNITS = {
    "step time": {"s"},
    "throughput": {"tokens/s", "samples/s"},
    "peak memory": {"MiB", "bytes"},
    "requested memory": {"MiB"},
    "allocated memory": {"MiB", "GiB"},
    "reserved memory": {"bytes", "MiB", "GiB"},
    "energy": {"J"},
    "largest batch": {"samples"},
    "time over plain": {""},
}


def test_every_row_is_of_a_page_and_has_a_quantity_and_settings_that_are_read() -> None:
    with DATA.open(encoding="utf-8") as file:
        assert Counter(cells["page"] for cells in csv.DictReader(file)) == Counter(
            row.page for row in ROWS
        )
    for row in ROWS:
        assert row.unit in UNITS[row.quantity]
        assert (row.settings or {}).keys() <= SETTINGS[row.page]
        if not row.not_predicted:
            assert row.read_from
            assert find_target(row.target).memory_bytes > 10 * 2**30
            assert row.page in ("ranks", "measured_steps") or row.source in SOURCES.values()
    assert {row.settings.get("attention", "") for row in STEPS + RANKS} == KERNELS.keys()
    assert {row.model for row in ROWS} >= MODELS.keys()


@pytest.mark.parametrize("row", [row for row in STEPS if "mfu" in row.settings], ids=lambda r: r.id)
def test_tokens_per_second_and_utilisation_that_were_copied_agree(row) -> None:
    """Korthikanti et al. 2022, as both sources count: 6 P + 12 layers T d FLOPs a token."""
    model, settings = MODELS[row.model], row.settings
    layers = model.get("layers") or model["num_hidden_layers"]
    d_model = model.get("d_model") or model["hidden_size"]
    flops = 6 * settings["parameters"] + 12 * layers * d_model * settings["seq_len"]
    peak = find_target(row.target).flops_per_s["bfloat16"]

    assert 100 * flops * row.value / peak == pytest.approx(settings["mfu"], abs=0.06)


def test_the_parameters_that_were_copied_are_those_of_the_model() -> None:
    for row in STEPS:
        if "mfu" in row.settings and "d_model" in MODELS[row.model]:
            V, D, layers, _ = MODELS[row.model].values()
            blocks = layers * (12 * D**2 + 13 * D)
            ends = V * D + row.settings["seq_len"] * D + 2 * D
            assert row.settings["parameters"] == blocks + ends


def test_every_row_of_private_training_is_re_created_or_has_a_reason() -> None:
    """458 numbers were collected; the numbers of each group say that none is left out."""
    groups = Counter(row.group for row in PRIVATE)

    assert len({row.id for row in PRIVATE}) == len(PRIVATE) == 458
    for group, count in groups.items():
        assert {row.id for row in PRIVATE if row.group == group} == {
            f"{group}-{number:03d}" for number in range(count)
        }
    for row in PRIVATE:
        assert bool(row.model) != bool(row.not_predicted)
        assert not row.not_predicted or row.not_predicted in NOT_RECREATED
        assert row.not_predicted or row.settings["size"]
        assert not row.model or row.read_from.startswith("https://github.com/")
