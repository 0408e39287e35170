"""Dense peaks computed again, from what white papers say of processors and clocks.

Columns of processors.csv: multiprocessors, dense FLOPs in 16 bits that each does in a clock, added
up in float32, and the boost clock of matrix products in MHz, which on Hopper is lower than the
board's. Clocks: tables of the architecture white papers; for L40, L40S, L4 and smaller GeForce
cards their data sheets; the B200's is in no vendor's document that could be found, and is that of
hmc-tech.com/gpu/nvidia-b200.
"""

import csv
from pathlib import Path

import pytest

from dpprof.experiments.config import registry
from dpprof.experiments.config.datasheets import (
    H100_NVL,
    RTX_3060,
    RTX_4060_TI,
    RTX_4060_TI_16GB,
    find_by_device_name,
    find_context,
    find_watts,
    list_targets,
)

with Path(__file__).with_name("processors.csv").open(encoding="utf-8") as file:
    PROCESSORS = {name: tuple(map(int, numbers)) for name, *numbers in [*csv.reader(file)][1:]}


@pytest.mark.parametrize("name", PROCESSORS)
def test_no_peak_is_that_of_sparse_matrices(name: str) -> None:
    processors, flops_per_clock, mhz = PROCESSORS[name]
    gpu = find_by_device_name(name)
    peaks = gpu.flops_per_s

    assert gpu.multiprocessors == processors
    assert gpu.peak("float16") == pytest.approx(processors * flops_per_clock * mhz * 1e6, rel=0.05)
    if gpu.price_of("bfloat16"):
        assert peaks["bfloat16"] == peaks["tf32"] == peaks["float32"]
    else:
        assert gpu.peak("bfloat16") == gpu.peak("float16")
        assert peaks["tf32"] == pytest.approx(peaks["bfloat16"] / 2, rel=0.05)


def test_a_card_without_tensor_cores_for_bfloat16_says_what_that_costs() -> None:
    for name in PROCESSORS:
        gpu = find_by_device_name(name)
        is_told = gpu.price_of("bfloat16") is not None
        assert is_told == (gpu.compute_capability in ("7.0", "7.5"))
        assert gpu.price_of("float16") is gpu.price_of("float32") is None
        assert (gpu.price_of("tf32") is not None) == is_told
    assert find_by_device_name("Tesla T4").price_of("bfloat16") == (
        "compute capability 7.5 has no units for bfloat16: products run at most as fast as in "
        "float32, and attention keeps every score; use float16"
    )
    assert find_by_device_name("Tesla T4").price_of("tf32") == (
        "compute capability 7.5 has no units for TF32: products are those of float32; use float16"
    )


@pytest.mark.parametrize("gpu", [RTX_4060_TI, RTX_4060_TI_16GB])
def test_boards_of_two_sizes_differ_in_memory_alone(gpu) -> None:
    assert gpu.flops_per_s["bfloat16"] == pytest.approx(34 * 512 * 2535e6, rel=0.05)
    assert gpu.flops_per_s == RTX_4060_TI.flops_per_s
    assert find_by_device_name("NVIDIA GeForce RTX 4060 Ti") is None
    assert RTX_4060_TI_16GB.memory_bytes > 2 * RTX_4060_TI.memory_bytes


def test_the_small_card_whose_name_says_too_little_is_known_as_a_target_alone() -> None:
    peak = RTX_3060.flops_per_s["bfloat16"]

    assert find_by_device_name("NVIDIA GeForce RTX 3060") is None
    assert peak == pytest.approx(28 * 512 * 1777e6, rel=0.05)
    assert RTX_3060.flops_per_s["tf32"] == pytest.approx(peak / 2, rel=0.05)


def test_the_nvl_board_stays_below_its_highest_clock_and_far_below_a_sparse_peak() -> None:
    """Its clock for matrix products is nowhere published; the board's boost is 1,785 MHz."""
    most = 132 * 4096 * 1785e6

    assert 0.8 * most < H100_NVL.flops_per_s["bfloat16"] < most
    assert H100_NVL.flops_per_s["tf32"] == H100_NVL.flops_per_s["bfloat16"] / 2
    assert H100_NVL.flops_per_s["float32"] == pytest.approx(132 * 256 * 1785e6, rel=0.05)


def test_every_gpu_that_is_a_target_is_known_by_its_drivers_name_and_checked_here() -> None:
    targets = [registry.load("targets", name) for name in registry.names("targets")]
    named = [find_by_device_name(name) for name in [*PROCESSORS, "NVIDIA H100 NVL"]]
    known = {*named, RTX_3060, RTX_4060_TI, RTX_4060_TI_16GB}

    assert known == {target for target in targets if target is not None}
    assert known == set(list_targets().values())


def test_what_others_call_a_gpu_is_the_same_gpu() -> None:
    for name, other in (("a100-80gb", "a100"), ("h100-sxm", "h100"), ("v100-16gb", "v100")):
        assert registry.load("targets", name) is registry.load("targets", other)


def test_a_context_is_as_large_as_measured_and_else_as_assumed() -> None:
    assert find_context("t4") == 141 * 2**20
    assert find_context("h100") == find_context(RTX_3060) == 600 * 2**20


def test_a_boards_power_is_known_by_its_data_sheet_alone() -> None:
    assert find_watts(registry.find_gpu("t4")) == 70
    assert find_watts(registry.find_gpu("h100-sxm")) == 700
    assert find_watts(RTX_3060.model_copy(update={"source": "another"})) is None
    assert find_watts(registry.find_gpu("cpu")) is None


def test_an_unknown_variant_has_no_data_sheet() -> None:
    assert find_by_device_name("NVIDIA H100 SXM5 64GB") is None
    assert find_by_device_name(None) is None
