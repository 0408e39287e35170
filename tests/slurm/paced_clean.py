"""Instrument ``clean`` of a checkout in which nothing is trained, and the test sets the pace.

A run leaves a file with its process's number in the folder ``DPPROF_TEST_STAGE`` when it has begun,
and goes on when the test puts ``go-<batch size>`` there. Its figures are invented.
"""

import os
import time
from pathlib import Path

from dpprof.records.result import Measurement

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
    seconds = 0.001 * batch_size
    return Measurement.model_validate(
        {
            "model": {"parameters_total": 1, "parameters_trainable": 1, "parameters_bytes": 4},
            "memory": {
                "peak_allocated_bytes": 2**20,
                "snapshots": [{"name": "model_loaded", "rss_bytes": 2**19, "elapsed_s": 0.0}],
            },
            "time": {
                "step_s": [seconds] * experiment.timed_steps,
                "warmup_step_s": [seconds] * experiment.warmup_steps,
                "median_s": seconds,
            },
            "throughput": {
                "tokens_per_s": experiment.seq_len / 0.001,
                "samples_per_s": 1 / 0.001,
                "steps_per_s": 1 / seconds,
            },
        }
    )
