"""How busy others kept the machine's cores while an experiment ran."""

import resource
import time

import psutil


class Contention:
    """Watches from when it is made; for one child process at a time.

    What is not this process's children's is others': other programs, the kernel's own work,
    and on a virtual machine what the hypervisor took.
    """

    def __init__(self) -> None:
        self._since = time.monotonic()
        self._others = _busy_s() - _children_s()

    def busy_cores(self) -> float:
        """Return how many cores others kept busy since, on average; 0.01 is nothing.

        Call it when the child has been waited for, whose time counts only then.
        """
        elapsed_s = time.monotonic() - self._since
        return (_busy_s() - _children_s() - self._others) / elapsed_s


def _busy_s() -> float:
    """Add up the seconds that all cores together have not been idle since boot."""
    times = psutil.cpu_times()._asdict()
    # Linux counts a guest's time as user time as well.
    idle = ("idle", "iowait", "guest", "guest_nice")
    return float(sum(value for name, value in times.items() if name not in idle))


def _children_s() -> float:
    """Add up the processor seconds of children that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime
