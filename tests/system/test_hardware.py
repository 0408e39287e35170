from pathlib import Path

import pytest
import torch
from fake_gpus import fake_driver

from dpprof.system import hardware


@pytest.fixture
def three_gpus(monkeypatch) -> None:
    """A driver that shows three GPUs."""
    alike = {"name": "NVIDIA H200", "memory_bytes": 150 * 2**30}
    uuids = ("GPU-aaaa1111", "GPU-bbbb2222", "GPU-cccc3333")
    driver = fake_driver(lambda: [{"uuid": uuid} | alike for uuid in uuids])
    monkeypatch.setattr(hardware, "pynvml", driver)
    monkeypatch.setattr(hardware, "torch_build", lambda: ("2.13.0", "13.0"))


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ["GPU-aaaa1111", "GPU-bbbb2222", "GPU-cccc3333"]),
        ("2,0", ["GPU-cccc3333", "GPU-aaaa1111"]),
        ("GPU-bbbb", ["GPU-bbbb2222"]),
        ("", []),
        ("-1", []),
        ("1,7,0", ["GPU-bbbb2222"]),
        ("MIG-1234", ["MIG-1234"]),
    ],
)
def test_cuda_visible_devices_is_read_as_cuda_reads_it(
    three_gpus, monkeypatch, visible: str | None, expected: list[str]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    assert [gpu.uuid for gpu in hardware.visible_gpus()] == expected


def test_auto_is_cuda_where_it_can_be_used(three_gpus, monkeypatch, capsys) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    assert hardware.resolve_device() == "cuda"
    assert capsys.readouterr().err == ""


def test_hidden_gpus_fall_back_to_the_cpu_with_one_line(three_gpus, monkeypatch, capsys) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")

    assert hardware.resolve_device() == "cpu"
    said = capsys.readouterr().err
    assert (
        said
        == "dpprof: no CUDA (CUDA_VISIBLE_DEVICES='' hides every GPU); experiments run on the CPU\n"
    )


def test_a_torch_without_cuda_is_named(three_gpus, monkeypatch) -> None:
    monkeypatch.setattr(hardware, "torch_build", lambda: ("2.13.0+cpu", None))

    assert hardware.why_no_cuda() == "torch 2.13.0+cpu was built without CUDA"


@pytest.fixture
def driver(three_gpus, monkeypatch):
    """Set the driver's version, the CUDA that it is for, and the one that torch is for."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def install(name: str, cuda: int, built_for: str) -> None:
        monkeypatch.setattr(hardware.pynvml, "nvmlSystemGetDriverVersion", lambda: name)
        monkeypatch.setattr(hardware.pynvml, "nvmlSystemGetCudaDriverVersion_v2", lambda: cuda)
        monkeypatch.setattr(hardware, "torch_build", lambda: ("2.13.0", built_for))

    return install


def test_a_driver_older_than_torchs_cuda_means_the_cpu_with_one_line(driver, capsys) -> None:
    driver("550.54.15", 12040, "13.0")

    assert hardware.resolve_device() == "cpu"
    assert capsys.readouterr().err == (
        "dpprof: no CUDA (torch 2.13.0 was built for CUDA 13.0, which needs driver 580.65.06 or "
        "newer, and driver 550.54.15 is for CUDA 12.4); experiments run on the CPU\n"
    )


def test_a_cuda_without_a_known_driver_is_named_all_the_same(driver) -> None:
    driver("580.95.05", 13000, "14.2")

    assert "CUDA 14.2, which needs a driver for CUDA 14, and driver" in hardware.why_no_cuda()


@pytest.mark.parametrize(
    ("cuda", "built_for"), [(12040, "12.8"), (13010, "13.0"), (13000, "13.1"), (13000, "12.6")]
)
def test_a_driver_of_the_same_major_or_a_newer_one_will_do(driver, cuda, built_for) -> None:
    driver("some", cuda, built_for)

    assert hardware.why_no_cuda() is None


def test_a_driver_that_does_not_tell_is_not_held_against_it(driver, monkeypatch) -> None:
    def refuse():
        raise hardware.pynvml.NVMLError("not supported")

    driver("550.54.15", 12040, "13.0")
    monkeypatch.setattr(hardware.pynvml, "nvmlSystemGetCudaDriverVersion_v2", refuse)

    assert hardware.why_no_cuda() is None


def test_torch_build_agrees_with_torch() -> None:
    assert hardware.torch_build() == (torch.__version__, torch.version.cuda)


def test_cpu_is_described_without_guessing() -> None:
    facts = hardware.describe_cpu(threads=3)

    assert facts["threads"] == 3
    total_kib = int(Path("/proc/meminfo").read_text().split()[1])
    assert facts["memory_total_bytes"] == total_kib * 1024
