# ruff: noqa: N802 (the names are NVIDIA's)
"""A driver's library with the GPUs that a file lists, for processes with this folder on PYTHONPATH.

``DPPROF_FAKE_GPUS`` names the file: JSON, a list of mappings of ``uuid``, ``name``,
``memory_bytes``, and what others use, ``used_bytes`` and ``load`` in percent. It is read at every
query, so what others use may change.
"""

import json
import os
from pathlib import Path
from types import SimpleNamespace

NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0
nvmlMemory_v2 = 0x02000028  # noqa: N816 (NVIDIA's name)


class NVMLError(Exception):
    """Any error of the library."""


def _gpus():
    return json.loads(Path(os.environ["DPPROF_FAKE_GPUS"]).read_text())


def nvmlInit():
    pass


def nvmlShutdown():
    pass


def nvmlSystemGetDriverVersion():
    return "580.95.05"


def nvmlSystemGetCudaDriverVersion_v2():
    return 13000


def nvmlDeviceGetCount():
    return len(_gpus())


def nvmlDeviceGetHandleByIndex(index):
    return _gpus()[index]["uuid"]


def nvmlDeviceGetHandleByUUID(uuid):
    if uuid not in [gpu["uuid"] for gpu in _gpus()]:
        raise NVMLError("Not Found")
    return uuid


def _find(uuid):
    return next(gpu for gpu in _gpus() if gpu["uuid"] == uuid)


def nvmlDeviceGetUUID(uuid):
    return uuid


def nvmlDeviceGetName(uuid):
    return _find(uuid)["name"]


def nvmlDeviceGetMemoryInfo(uuid, version=None):
    gpu = _find(uuid)
    return SimpleNamespace(total=gpu["memory_bytes"], used=gpu.get("used_bytes", 0))


def nvmlDeviceGetUtilizationRates(uuid):
    return SimpleNamespace(gpu=_find(uuid)["load"], memory=0)


def nvmlDeviceGetComputeRunningProcesses(uuid):
    return []


def nvmlDeviceGetClockInfo(uuid, clock):
    return 1980


def nvmlDeviceGetTemperature(uuid, sensor):
    return 40


def nvmlDeviceGetPowerUsage(uuid):
    return 100_000
