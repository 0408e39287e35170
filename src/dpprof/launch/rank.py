"""The process of one rank: joins the others, and runs the instrument."""

import os
import sys
from datetime import timedelta
from functools import partial

from dpprof.launch.measuring import lift_memory_limit, run
from dpprof.launch.protocol import PhaseMark, WorkerAnswer
from dpprof.spec.experiment import Experiment


def work(spec: str, instrument: str, phase_fd: int, rank: int, store_fd: int) -> WorkerAnswer:
    """Run one rank of an experiment, given as JSON, and return its report.

    ``store_fd`` is a file by which the ranks find each other; it has no name.
    """
    experiment = Experiment.model_validate_json(spec)
    join = partial(_join, experiment, rank, store_fd)
    report = run(experiment, instrument, PhaseMark(phase_fd), join)
    lift_memory_limit()
    return report


def _join(experiment: Experiment, rank: int, store_fd: int) -> None:
    """Join the other ranks; on GPUs, take the one of this rank's number."""
    import torch  # noqa: PLC0415 (the instrument has imported it already)
    from torch import distributed  # noqa: PLC0415

    on_cuda = experiment.device == "cuda"
    if on_cuda:
        torch.cuda.set_device(rank)
    elif sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # a host's name may have no address
    distributed.init_process_group(
        "nccl" if on_cuda else "gloo",
        init_method=f"file:///proc/self/fd/{store_fd}",
        rank=rank,
        world_size=experiment.world_size,
        timeout=timedelta(seconds=experiment.timeout_s),
    )
