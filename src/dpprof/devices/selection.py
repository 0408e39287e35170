"""Opens a device by its name."""

from dpprof.devices.cpu import Cpu
from dpprof.devices.cuda import Cuda
from dpprof.devices.device import Device


def open_device(name: str) -> Device:
    """Open ``cpu`` or ``cuda``."""
    return {"cpu": Cpu, "cuda": Cuda}[name]()
