"""Dense peaks computed again, from what white papers say of processors and clocks.

Columns: multiprocessors, dense FLOPs in 16 bits that each does in a clock, added up in float32, and
the boost clock of matrix products in MHz, which on Hopper is lower than the board's. Clocks: tables
of the architecture white papers; for L40S and L4 their data sheets; the B200's is not in a
vendor's document that could be found, and is that of hmc-tech.com/gpu/nvidia-b200.
"""

import pytest

from dpprof.experiments.config import registry
from dpprof.experiments.config.datasheets import H100_NVL, RTX_3060, find_by_device_name

PROCESSORS = {
    "NVIDIA H200": (132, 4096, 1830),
    "NVIDIA H100 80GB HBM3": (132, 4096, 1830),
    "NVIDIA H100 PCIe": (114, 4096, 1620),
    "NVIDIA A100-SXM4-80GB": (108, 2048, 1410),
    "NVIDIA A100 80GB PCIe": (108, 2048, 1410),
    "NVIDIA A100-SXM4-40GB": (108, 2048, 1410),
    "NVIDIA B200": (148, 8192, 1860),
    "NVIDIA L40S": (142, 1024, 2520),
    "NVIDIA L4": (58, 1024, 2040),
    "NVIDIA GeForce RTX 4090": (128, 512, 2520),
    "NVIDIA A10G": (80, 512, 1710),
    "NVIDIA RTX A5000": (64, 1024, 1695),
    "NVIDIA RTX A6000": (84, 1024, 1800),
    "NVIDIA GeForce RTX 3090": (82, 512, 1695),
    "NVIDIA GeForce RTX 5090": (170, 512, 2407),
    "NVIDIA RTX PRO 6000 Blackwell Workstation Edition": (188, 1024, 2617),
    "Tesla T4": (40, 1024, 1590),
    "Tesla V100-SXM2-16GB": (80, 1024, 1530),
    "Tesla V100-SXM2-32GB": (80, 1024, 1530),
}


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
    known = [*named, RTX_3060]

    assert all(target in known for target in targets if target is not None)
    assert len(known) == len([target for target in targets if target is not None])


def test_an_unknown_variant_has_no_data_sheet() -> None:
    assert find_by_device_name("NVIDIA H100 SXM5 64GB") is None
    assert find_by_device_name(None) is None
