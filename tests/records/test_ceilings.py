"""What a file of ceilings says, whose it is, and that it can be trusted."""

import pytest
from factory import CPU, write_synthetic_ceilings

from dpprof.experiments.config.target import DTYPES
from dpprof.experiments.records.ceilings import (
    ceilings_path,
    device_name,
    find_ceilings,
    nothing_measured,
    read_ceilings,
)
from dpprof.system.hardware import describe_cpu

GPU = {"type": "cuda", "name": "NVIDIA H100 80GB HBM3", "uuid": "GPU-1", "power_w": 70.0}


@pytest.mark.parametrize(
    ("description", "name"),
    [
        (GPU, "cuda-nvidia-h100-80gb-hbm3"),
        ({"type": "cuda", "name": None}, "cuda"),
        (CPU, "cpu-synthetic-cpu-2-cores"),
        (CPU | {"threads": 1}, "cpu-synthetic-cpu-2-cores"),
        (
            {"type": "cpu", "name": "Intel(R) Xeon(R) CPU @ 2.20GHz", "cores": 16},
            "cpu-intel-xeon-cpu-2-20ghz-16-cores",
        ),
        ({"type": "cpu", "name": "../x; touch $(y)", "cores": 1}, "cpu-x-touch-y-1-cores"),
    ],
)
def test_a_device_is_named_by_letters_digits_and_hyphens(description, name) -> None:
    assert device_name(description) == name


def test_an_experiment_on_fewer_threads_finds_the_ceilings_of_the_whole_device(tmp_path) -> None:
    here = write_synthetic_ceilings(tmp_path, describe_cpu(threads=2))

    assert find_ceilings([here], describe_cpu(threads=1)) == here


def test_ceilings_are_found_by_what_they_say_and_not_by_their_files_name(tmp_path) -> None:
    cpu, gpu = (write_synthetic_ceilings(tmp_path, device) for device in (CPU, GPU))
    ceilings_path(tmp_path, device_name(GPU)).rename(ceilings_path(tmp_path, "cuda"))
    known = [cpu, read_ceilings(ceilings_path(tmp_path, "cuda"))]

    assert find_ceilings(known, GPU | {"uuid": "GPU-2", "power_w": 500.0}) == gpu
    assert find_ceilings(known, GPU | {"name": "NVIDIA H200"}) is None
    assert find_ceilings(known, CPU | {"cores": 4}) is None


def test_a_device_that_does_not_say_what_it_is_has_no_ceilings(tmp_path) -> None:
    nameless = write_synthetic_ceilings(tmp_path, {"name": None})

    assert find_ceilings([nameless], CPU) is None
    assert find_ceilings([write_synthetic_ceilings(tmp_path, CPU)], {}) is None


def test_of_several_the_last_measured_count(tmp_path) -> None:
    old, new = (
        write_synthetic_ceilings(tmp_path, started_at=f"2026-01-0{day}T00:00:00+00:00")
        for day in (1, 2)
    )

    assert find_ceilings([new, old], CPU) == new


def test_what_was_not_measured_is_null_with_the_reason() -> None:
    limits = nothing_measured("it hung")

    assert limits.matmul == dict.fromkeys(DTYPES)
    assert (limits.bandwidth, limits.launch_latency_s) == (None, None)
    assert limits.reasons == dict.fromkeys(
        [
            "matmul.float32",
            "matmul.tf32",
            "matmul.bfloat16",
            "matmul.float64",
            "matmul.float16",
            "bandwidth",
            "launch_latency_s",
        ],
        "it hung",
    )
