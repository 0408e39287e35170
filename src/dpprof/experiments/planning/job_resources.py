"""What a job of a sweep needs: cores, GPUs, memory and time, for whoever schedules it."""

import math

from dpprof.experiments.config.experiment import Experiment
from dpprof.system.hardware import interchangeable_gpus

_MIB = 2**20
_HOST_MB = {"cpu": 16_000, "cuda": 32_000}
"""MiB of memory that a measurement may need on its host, by device, where no limit says more."""

_BESIDE_LIMIT_MB = 4_000
"""MiB of libraries and code, which ``memory_limit_bytes`` does not cover, of each rank."""

PREDICTION_MB = 8_000
"""MiB of memory that a prediction may need: it holds no model, but every operator of a step."""

_START_S = 90  # starting Python and its libraries, once for each attempt, on a slow file system
MAX_ATTEMPTS = 2  # a run is attempted so many times at most

WAIT_UNDER_A_SCHEDULER_S = 600.0
"""How long a scheduler's job waits for its device where nobody says: an allocation costs money."""


def host_memory_mb(experiment: Experiment) -> int:
    """Return the host memory, in MiB, that a measurement should be given."""
    limit, ranks = experiment.memory_limit_bytes or 0, experiment.world_size
    own = _HOST_MB[experiment.device] + (ranks - 1) * _BESIDE_LIMIT_MB
    return max(own, ranks * (math.ceil(limit / _MIB) + _BESIDE_LIMIT_MB))


def runtime_minutes(experiment: Experiment) -> int:
    """Return the minutes within which a job ends in any case: waiting, and both attempts."""
    tried_s = MAX_ATTEMPTS * (experiment.timeout_s + _START_S)
    return math.ceil((WAIT_UNDER_A_SCHEDULER_S + tried_s) / 60)


def gpus_at_once(limit: int | None) -> int:
    """Return on how many GPUs experiments run at the same time, at least 1.

    They are the interchangeable GPUs of this machine, or fewer if ``--resources gpu=N`` says so.
    """
    present = len(interchangeable_gpus())
    return max(1, min(present, limit) if limit else present)
