"""Another package's instruments, most of which fail, each in its own way.

They import no torch, so a test of what a supervisor makes of an end takes a second.
"""

import atexit
import ctypes
import os
import signal
import time
from pathlib import Path

from dpprof.experiments.records.result import Measurement, Time
from dpprof.private.errors import UnsupportedError


def segfault(_experiment, enter):
    enter("backward")
    ctypes.string_at(0)


def fail(_experiment, enter):
    enter("backward")
    raise RuntimeError(
        "it broke: <script>alert(1)</script> \\input{x} $(touch pwned) | `x` & \x1b[31m"
    )


def sleep(_experiment, enter):
    enter("backward")
    if marker := os.environ.get("DPPROF_TEST_MARKER"):
        Path(marker).touch()
    time.sleep(3600)


def wait_to_be_let_go(_experiment, _enter):
    marker = Path(os.environ["DPPROF_TEST_MARKER"])
    marker.touch()
    while marker.exists():
        time.sleep(0.05)
    return Measurement()


def meet(experiment, enter):
    """Stay until so many are here at the same time; who comes later waits for as many more."""
    folder = Path(os.environ["DPPROF_TEST_MARKER"])
    together = int(os.environ["DPPROF_TEST_TOGETHER"])
    number = 0
    while not _is_first(folder / str(number)):
        number += 1
    while len(list(folder.iterdir())) < (number // together + 1) * together:
        time.sleep(0.02)
    return measure(experiment, enter)


def _is_first(path):
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def measure(_experiment, _enter):
    time_part = Time(step_s=[1.0], warmup_step_s=None, median_s=1.0, phases_s=None)
    return Measurement(time=time_part)


def hang_at_exit(experiment, enter):
    atexit.register(time.sleep, 3600)
    return measure(experiment, enter)


def die(_experiment, enter):
    enter("backward")
    os.kill(os.getpid(), signal.SIGKILL)


def die_once(experiment, enter):
    marker = Path(os.environ["DPPROF_TEST_MARKER"])
    if not marker.exists():
        marker.touch()
        die(experiment, enter)
    return measure(experiment, enter)


def refuse(_experiment, _enter):
    raise UnsupportedError("this instrument refuses every method")


def abort(_experiment, enter):
    """Say what the test has it say, as a library would, and abort deep down."""
    enter("backward")
    os.write(2, os.environ["DPPROF_TEST_LAST_WORDS"].encode())

    def descend(depth):
        if depth:
            descend(depth - 1)
        os.abort()

    descend(50)


def refuse_memory(_experiment, enter):
    enter("forward")
    raise RuntimeError("could not create a primitive")


def flood(_experiment, _enter):
    """Print 300 MB without a newline, and die."""
    for _ in range(300):
        os.write(1, b"x" * 10**6)
    os.write(1, b"the end")
    os._exit(7)


def say_much(_experiment, _enter):
    raise RuntimeError("y" * 10**7)


def say_what_has_no_encoding(_experiment, _enter):
    raise RuntimeError("half a \ud800 character")


def _on_rank_1(experiment, enter, act):
    """Act on rank 1, in the phase clip, while other ranks wait for it in forward."""
    from torch import distributed  # noqa: PLC0415

    if distributed.get_rank() == 1:
        enter("clip")
        act()
    enter("forward")
    distributed.barrier()
    return measure(experiment, enter)


def die_on_rank_1(experiment, enter):
    return _on_rank_1(experiment, enter, lambda: os.kill(os.getpid(), signal.SIGKILL))


def run_out_of_memory_on_rank_1(experiment, enter):
    def run_out():
        raise MemoryError("no room for a shard")

    return _on_rank_1(experiment, enter, run_out)


def wait_on_rank_1(experiment, enter):
    """Tell the process of rank 1, and wait there."""

    def wait():
        Path(os.environ["DPPROF_TEST_MARKER"]).write_text(str(os.getpid()))
        time.sleep(3600)

    return _on_rank_1(experiment, enter, wait)
