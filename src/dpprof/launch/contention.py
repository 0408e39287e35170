"""Measures how busy other processes kept the machine's cores while an experiment ran."""

import resource
import time
from collections.abc import Callable

import psutil


def watch_others() -> Callable[[], float]:
    """Return a function for the average number of cores that others keep busy from now on.

    All time that is not this process's children's counts as others': other programs, the kernel,
    and on a virtual machine the hypervisor; 0.01 is negligible. Wait for the one child before the
    call, because its time counts only then.
    """
    since_s, before_s = time.monotonic(), _busy_s() - _children_s()
    return lambda: (_busy_s() - _children_s() - before_s) / (time.monotonic() - since_s)


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
