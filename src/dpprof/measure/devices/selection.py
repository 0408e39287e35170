"""Opens a device by its name."""

from dpprof.measure.devices.cpu import Cpu
from dpprof.measure.devices.cuda import Cuda
from dpprof.measure.devices.device import Device


def open_device(name: str) -> Device:
    """Open ``cpu`` or ``cuda``."""
    return {"cpu": Cpu, "cuda": Cuda}[name]()
