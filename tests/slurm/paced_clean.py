"""Instrument ``clean`` of a checkout in which nothing is trained, and the test sets the pace.

A run leaves a file with its process's number in the folder ``DPPROF_TEST_STAGE`` when it has begun,
and goes on when the test puts ``go-<batch size>`` there. Its figures are invented.
"""

import os
import time
from pathlib import Path

from dpprof.measure.instruments.quick_clean import measure as invent

FAILS = 4
"""The batch size whose run raises an exception."""


def measure(experiment, enter):
    enter("backward")
    batch_size, stage = experiment.batch_size, Path(os.environ["DPPROF_TEST_STAGE"])
    if batch_size == FAILS:
        raise RuntimeError("this experiment fails")
    (stage / f"begun-{batch_size}-{os.getpid()}").touch()
    while not (stage / f"go-{batch_size}").exists():
        time.sleep(0.05)
    return invent(experiment, enter)
