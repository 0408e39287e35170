"""Measures how busy other processes kept the machine's cores while an experiment ran."""

import resource
import time

import psutil


class Contention:
    """Measures from its creation on, for one child process at a time.

    All time that is not this process's children's counts as others': other programs, the kernel,
    and on a virtual machine the hypervisor.
    """

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._others = _busy_s() - _children_s()

    def busy_cores(self) -> float:
        """Return the average number of cores that others kept busy since; 0.01 is negligible.

        Wait for the child before the call, because its time counts only then.
        """
        elapsed_s = time.monotonic() - self._since
        return (_busy_s() - _children_s() - self._others) / elapsed_s


def _busy_s() -> float:
    """Return the busy seconds of all cores together since boot."""
    times = psutil.cpu_times()._asdict()
    # Linux counts a guest's time as user time as well.
    idle = ("idle", "iowait", "guest", "guest_nice")
    return float(sum(value for name, value in times.items() if name not in idle))


def _children_s() -> float:
    """Return the processor seconds of children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
