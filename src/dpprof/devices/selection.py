"""From a device's name to the device."""

from dpprof.devices.base import Device
from dpprof.devices.cpu import Cpu
from dpprof.devices.cuda import Cuda


def open_device(name: str) -> Device:
    """Open ``cpu`` or ``cuda``."""
    return {"cpu": Cpu, "cuda": Cuda}[name]()
