"""NVML of a machine with three equal GPUs that nobody else uses; there is none behind it."""

# ruff: noqa: N802, N816 (the names are NVIDIA's)

from types import SimpleNamespace

UUIDS = ["GPU-00000000-fake", "GPU-11111111-fake", "GPU-22222222-fake"]

NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU, nvmlMemory_v2 = 1, 2, 0, 2


class NVMLError(Exception):
    """What a machine without a driver would raise."""


def nvmlInit():
    """Find the driver."""


def nvmlShutdown():
    """Leave it."""


def nvmlDeviceGetCount():
    return len(UUIDS)


def nvmlDeviceGetHandleByIndex(index):
    return UUIDS[index]


def nvmlDeviceGetHandleByUUID(uuid):
    return uuid


def nvmlDeviceGetUUID(handle):
    return handle


def nvmlDeviceGetName(_handle):
    return "Fake GPU"


def nvmlDeviceGetMemoryInfo(_handle, _version=1):
    return SimpleNamespace(total=8 * 2**30, used=0)


def nvmlDeviceGetComputeRunningProcesses(_handle):
    return []


def nvmlDeviceGetUtilizationRates(_handle):
    return SimpleNamespace(gpu=0)


def nvmlDeviceGetClockInfo(_handle, _kind):
    return 1000


def nvmlDeviceGetTemperature(_handle, _sensor):
    return 40


def nvmlDeviceGetPowerUsage(_handle):
    return 100_000


def nvmlSystemGetDriverVersion():
    return "999.0"


def nvmlSystemGetCudaDriverVersion_v2():
    return 13000
