"""Instrument ``clean`` of a checkout in which nothing is trained: its figures are invented.

An experiment takes as long as starting a process then. Where ``DPPROF_TEST_MARKER`` names a
file that is not there yet, the first microbatch experiment makes it, and waits until it is gone.
"""

import os
import time
from pathlib import Path

from dpprof.experiments.records.result import Measurement


def measure(experiment, enter):
    enter("backward")
    marker = os.environ.get("DPPROF_TEST_MARKER")
    if experiment.method == "microbatch" and marker and not Path(marker).exists():
        Path(marker).touch()
        while Path(marker).exists():
            time.sleep(0.05)
    seconds = 0.001 * experiment.batch_size
    samples_per_s = experiment.batch_size / seconds
    return Measurement.model_validate(
        {
            "model": {"parameters_total": 1, "parameters_trainable": 1, "parameters_bytes": 4},
            "memory": {
                "peak_rss_bytes": 2**20,
                "snapshots": [{"name": "model_loaded", "rss_bytes": 2**19, "elapsed_s": 0.0}],
            },
            "time": {
                "step_s": [seconds] * experiment.timed_steps,
                "warmup_step_s": [seconds] * experiment.warmup_steps,
                "median_s": seconds,
            },
            "throughput": {
                "tokens_per_s": samples_per_s * experiment.seq_len,
                "samples_per_s": samples_per_s,
                "steps_per_s": 1 / seconds,
            },
        }
    )
