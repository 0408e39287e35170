"""Runs one instrument in this process, and reports the result or the failure."""

import pkgutil
import resource
import sys
import traceback
from collections.abc import Callable

from dpprof.launch.protocol import PhaseMark, WorkerAnswer
from dpprof.records.result import Failure
from dpprof.spec import registry
from dpprof.spec.experiment import Experiment
from dpprof.system.messages import KIND_LIMIT, shorten
from dpprof.system.out_of_memory import is_out_of_memory, requested_bytes
from dpprof.system.quick_imports import collecting_no_garbage

_IMPORT = "dpprof.instruments.setup:import_method"
"""Imports all that an experiment needs."""


def lift_memory_limit() -> None:
    """Remove the memory limit, so that there is memory to write the report."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def _allocator_state() -> dict[str, int]:
    """Return what the CUDA allocator holds at the time of a failure; empty without CUDA."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return {}
    return {
        "allocated_bytes": torch.cuda.memory_allocated(),
        "reserved_bytes": torch.cuda.memory_reserved(),
    }


def _describe(error: BaseException, mark: PhaseMark, *, memory: bool = False) -> Failure:
    message = str(error)
    return Failure(
        kind=shorten(type(error).__name__, KIND_LIMIT),
        message=shorten(message),
        phase=mark.read(),
        requested_bytes=requested_bytes(message) if memory else None,
        **(_allocator_state() if memory else {}),
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
            raise registry.UnsupportedError(reason)  # noqa: TRY301 (one way to refuse)
        with collecting_no_garbage():
            measure = registry.load("instruments", instrument)
            if registry.is_own("instruments", instrument):  # another's may need nothing of it
                pkgutil.resolve_name(_IMPORT)(experiment)
        join()
        measurement = measure(experiment, mark.enter)
    except registry.UnsupportedError as error:
        return WorkerAnswer(outcome="unsupported", error=_describe(error, mark))
    except BaseException as error:  # noqa: BLE001 (every way to fail is an outcome)
        lift_memory_limit()
        traceback.print_exc()
        memory = is_out_of_memory(error, limited=experiment.memory_limit_bytes is not None)
        failure = _describe(error, mark, memory=memory)
        return WorkerAnswer(outcome="oom" if memory else "crashed", error=failure)
    return WorkerAnswer(outcome="ok", measurement=measurement)
