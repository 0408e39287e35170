"""The worker process of an experiment: runs one instrument and reports the result or the failure.

The supervisor calls ``work`` in a child process, and a worker of several ranks ``work_on_rank`` in
one for each. A model that only the supervisor's process can build is for ``work_here``. A worker
returns a report unless its process dies; then its parent judges it by how the process ended.
"""

import gc
import os
import pkgutil
import resource
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial

from dpprof.experiments.config import registry
from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.launch.ranks_run import run_ranks
from dpprof.experiments.launch.worker_report import PhaseMark, WorkerAnswer
from dpprof.experiments.records.result import Failure
from dpprof.private.errors import UnsupportedError
from dpprof.private.substitutes import substitute
from dpprof.system.imports import collecting_no_garbage
from dpprof.system.messages import KIND_LIMIT, is_out_of_memory, requested_bytes, shorten

_IMPORT = "dpprof.subjects.setup:import_method"  # imports all that an experiment needs


def work(spec: str, instrument: str, phase_fd: int) -> WorkerAnswer:
    """Run an experiment, given as JSON, and return its report to the supervisor."""
    experiment = Experiment.model_validate_json(spec)
    needs_ranks = experiment.parallel is not None and instrument not in registry.PREDICTIONS
    if needs_ranks and registry.why_unsupported(experiment, instrument) is None:
        return run_ranks(experiment, instrument, phase_fd)
    return run(experiment, instrument, PhaseMark(phase_fd))


def work_on_rank(
    spec: str, instrument: str, phase_fd: int, rank: int, store_fd: int
) -> WorkerAnswer:
    """Run one rank of an experiment, given as JSON, and return its report.

    ``store_fd`` is a file by which the ranks find each other; it has no name.
    """
    experiment = Experiment.model_validate_json(spec)
    join = partial(_join, experiment, rank, store_fd)
    return run(experiment, instrument, PhaseMark(phase_fd), join)


def work_here(experiment: Experiment, instrument: str, mark: PhaseMark) -> WorkerAnswer:
    """Run a prediction in this process, which stays as it was.

    Raises:
        KeyboardInterrupt: The user has interrupted it.
    """
    limits = resource.getrlimit(resource.RLIMIT_DATA)
    with undisturbed():
        answer = run(experiment, instrument, mark)
    resource.setrlimit(resource.RLIMIT_DATA, limits)
    gc.unfreeze()  # garbage of before may be collected again
    if answer.error is not None and answer.error.kind == "KeyboardInterrupt":
        raise KeyboardInterrupt
    return answer


@contextmanager
def undisturbed() -> Iterator[None]:
    """Leave PyTorch's generators as they are, whatever a prediction within seeds and draws."""
    import torch  # noqa: PLC0415 (the prediction needs it, too)

    generator = torch.default_generator
    # A seed would reach CUDA's generators, also those that do not exist yet.
    with torch.random.fork_rng(devices=[]), substitute(torch, "manual_seed", lambda _: generator):
        yield


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


def _lift_memory_limit() -> None:
    """Remove the memory limit, so that there is memory to write the report."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def _describe(error: BaseException, mark: PhaseMark, *, memory: bool = False) -> Failure:
    message, torch = str(error), sys.modules.get("torch")
    held: dict[str, int] = {}
    if memory and torch is not None and torch.cuda.is_initialized():
        held["allocated_bytes"] = torch.cuda.memory_allocated()
        held["reserved_bytes"] = torch.cuda.memory_reserved()
    return Failure(
        kind=shorten(type(error).__name__, KIND_LIMIT),
        message=shorten(message),
        phase=mark.read(),
        requested_bytes=requested_bytes(message) if memory else None,
        **held,
    )


def run(
    experiment: Experiment,
    instrument: str,
    mark: PhaseMark,
    join: Callable[[], None] = lambda: None,
) -> WorkerAnswer:
    """Run one experiment under one instrument and return its report; raises nothing.

    ``join`` is called when all is imported and nothing is limited yet.
    """
    try:
        reason = registry.why_unsupported(experiment, instrument)
        if reason is not None:
            raise UnsupportedError(reason)  # noqa: TRY301 (one way to refuse)
        with collecting_no_garbage():
            measure = registry.load("instruments", instrument)
            if registry.is_own("instruments", instrument):  # another's may need nothing of it
                pkgutil.resolve_name(_IMPORT)(experiment)
        join()
        measurement = measure(experiment, mark.enter)
    except UnsupportedError as error:
        return WorkerAnswer(outcome="unsupported", error=_describe(error, mark))
    except BaseException as error:  # noqa: BLE001 (every way to fail is an outcome)
        _lift_memory_limit()
        traceback.print_exc()
        memory = is_out_of_memory(error, limited=experiment.memory_limit_bytes is not None)
        failure = _describe(error, mark, memory=memory)
        return WorkerAnswer(outcome="oom" if memory else "crashed", error=failure)
    finally:
        _lift_memory_limit()
    return WorkerAnswer(outcome="ok", measurement=measurement)
