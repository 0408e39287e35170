"""Another package's instruments, each of which ends badly before anything takes time.

They import no torch, so what a supervisor makes of an end is soon told.
"""

import atexit
import ctypes
import os
import time
from pathlib import Path

from dpprof.result import Measurement, Time


def segfault(_experiment, enter):
    enter("backward")
    ctypes.string_at(0)


def fail(_experiment, enter):
    enter("backward")
    raise RuntimeError("<it broke>")


def sleep(_experiment, enter):
    enter("backward")
    if marker := os.environ.get("DPPROF_TEST_MARKER"):
        Path(marker).touch()
    time.sleep(3600)


def leave(_experiment, enter):
    enter("backward")
    print("famous last words", flush=True)
    os._exit(7)


def leave_silently(_experiment, enter):
    enter("backward")
    os._exit(3)


def odd_signal(_experiment, enter):
    enter("backward")
    os.kill(os.getpid(), 40)


def hang_at_exit(_experiment, _enter):
    atexit.register(time.sleep, 3600)
    time_part = Time(step_s=[1.0], warmup_step_s=None, median_s=1.0, phases_s=None)
    return Measurement(time=time_part)
