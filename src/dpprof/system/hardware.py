"""Describes this machine's processor and GPUs without importing torch."""

import contextlib
import importlib.util
import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

import psutil

from dpprof.system.console import say

try:
    import pynvml
except ImportError:  # an environment that only plans
    pynvml = None


class Gpu(NamedTuple):
    """One CUDA device that this process may use."""

    uuid: str
    name: str | None
    memory_total_bytes: int | None


def available_cores() -> int:
    """Return the number of cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cpu_name() -> str:
    """Return the operating system's name of the processor."""
    with contextlib.suppress(OSError):
        text = Path("/proc/cpuinfo").read_text()
        if match := re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE):
            return match.group(1).strip()
    return platform.processor() or platform.machine()


@contextlib.contextmanager
def nvml() -> Iterator[Any]:
    """Open NVML; yield its module, or None where there is no driver or no pynvml.

    An error of NVML ends the block: in a container the driver may exist and still refuse queries.
    """
    if pynvml is None:
        yield None
        return
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        with contextlib.suppress(pynvml.NVMLError):
            yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _installed_gpus() -> list[Gpu]:
    """Return every GPU that the driver shows to this process, in PCI order."""
    gpus: list[Gpu] = []
    with nvml() as driver:
        for index in range(driver.nvmlDeviceGetCount() if driver else 0):
            handle = driver.nvmlDeviceGetHandleByIndex(index)
            memory = int(driver.nvmlDeviceGetMemoryInfo(handle).total)
            gpus.append(
                Gpu(driver.nvmlDeviceGetUUID(handle), driver.nvmlDeviceGetName(handle), memory)
            )
    return gpus


def visible_gpus() -> list[Gpu]:
    """Return the GPUs that ``CUDA_VISIBLE_DEVICES`` leaves to this process.

    As in CUDA, entries are indices (in PCI order) or UUIDs, and the list ends at the first entry
    that names no GPU. A MIG slice is listed by its UUID, without name and memory.
    """
    installed = _installed_gpus()
    wanted = os.environ.get("CUDA_VISIBLE_DEVICES")
    if wanted is None or not installed:
        return installed
    chosen: list[Gpu] = []
    for entry in (part.strip() for part in wanted.split(",")):
        if entry.isdigit() and int(entry) < len(installed):
            chosen.append(installed[int(entry)])
        elif entry.startswith("MIG-"):
            chosen.append(Gpu(entry, None, None))
        elif entry and (match := [gpu for gpu in installed if gpu.uuid.startswith(entry)]):
            chosen.append(match[0])
        else:
            break
    return chosen


def interchangeable_gpus() -> list[Gpu]:
    """Return the visible GPUs that have the model and the memory of the first one.

    Figures of other GPUs must not be mixed with theirs.
    """
    visible = visible_gpus()
    return [gpu for gpu in visible if gpu[1:] == visible[0][1:]]


def torch_build() -> tuple[str | None, str | None]:
    """Return the installed torch's version and CUDA version, without importing torch.

    Without CUDA in the build, the second is None; without torch, both are.
    """
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None, None
    text = Path(spec.origin).with_name("version.py").read_text(encoding="utf-8")
    version = re.search(r"^__version__ = '([^']+)'", text, re.MULTILINE)
    cuda = re.search(r"^cuda(?:: [^=]+)? = '([^']+)'", text, re.MULTILINE)
    return (version.group(1) if version else None), (cuda.group(1) if cuda else None)


_DRIVERS = {11: "450.80.02", 12: "525.60.13", 13: "580.65.06"}
"""The oldest Linux driver that runs every CUDA of a major version.

NVIDIA, "CUDA Compatibility", minor version compatibility.
"""


def _why_driver_is_too_old(version: str, cuda: str) -> str | None:
    """Return why torch cannot use the driver; None if it is newer or of the same major version."""
    built_for = int(cuda.partition(".")[0])
    name, major, minor = "", built_for, 0  # what cannot be asked will do
    with nvml() as driver:
        if driver:
            name = driver.nvmlSystemGetDriverVersion()
            major, minor = divmod(int(driver.nvmlSystemGetCudaDriverVersion_v2()) // 10, 100)
    if major >= built_for:
        return None
    oldest = _DRIVERS.get(built_for)
    needed = f"driver {oldest} or newer" if oldest else f"a driver for CUDA {built_for}"
    return (
        f"torch {version} was built for CUDA {cuda}, which needs {needed}, "
        f"and driver {name} is for CUDA {major}.{minor}"
    )


def why_no_cuda() -> str | None:
    """Return in a few words why CUDA cannot be used here; None where it can."""
    version, cuda = torch_build()
    if version is None:
        return "torch is not installed"
    if cuda is None:
        return f"torch {version} was built without CUDA"
    if not _installed_gpus():
        return "the NVIDIA driver shows no GPU"
    if not visible_gpus():
        return f"CUDA_VISIBLE_DEVICES={os.environ.get('CUDA_VISIBLE_DEVICES')!r} hides every GPU"
    return _why_driver_is_too_old(version, cuda)


def resolve_device() -> Literal["cpu", "cuda"]:
    """Return the device for ``device: auto``; print a line where it is the CPU."""
    reason = why_no_cuda()
    if reason is None:
        return "cuda"
    say(f"no CUDA ({reason}); experiments run on the CPU")
    return "cpu"


def describe_cpu(threads: int) -> dict[str, Any]:
    """Return a description of the host as the device of a CPU experiment."""
    return {
        "type": "cpu",
        "name": cpu_name(),
        "uuid": None,
        "memory_total_bytes": psutil.virtual_memory().total,
        "cores": available_cores(),
        "threads": threads,
    }


def describe_gpu(gpu: Gpu) -> dict[str, Any]:
    """Return a description of a GPU: its driver, and its present clocks, power and temperature."""
    facts: dict[str, Any] = {"type": "cuda", **gpu._asdict()}
    measured = ("driver", "sm_clock_mhz", "memory_clock_mhz", "temperature_c", "power_w")
    facts |= dict.fromkeys(measured)
    with nvml() as driver:
        if driver:
            facts["driver"] = driver.nvmlSystemGetDriverVersion()
            handle = driver.nvmlDeviceGetHandleByUUID(gpu.uuid)
            facts["sm_clock_mhz"] = driver.nvmlDeviceGetClockInfo(handle, driver.NVML_CLOCK_SM)
            facts["memory_clock_mhz"] = driver.nvmlDeviceGetClockInfo(handle, driver.NVML_CLOCK_MEM)
            sensor = driver.NVML_TEMPERATURE_GPU
            facts["temperature_c"] = driver.nvmlDeviceGetTemperature(handle, sensor)
            facts["power_w"] = driver.nvmlDeviceGetPowerUsage(handle) / 1000
    return facts
