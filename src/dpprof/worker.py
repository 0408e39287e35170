"""The inside of an experiment's process: run one instrument, tell what came of it.

Started by the supervisor as ``python -m dpprof.worker ASSIGNMENT``. A report is written
whenever Python lives to write it; the supervisor judges the rest by how the process died.
"""

import ctypes
import errno
import faulthandler
import os
import re
import resource
import signal
import sys
import traceback

from dpprof import catalogue
from dpprof.experiment import Experiment
from dpprof.handover import Assignment, PhaseMark, Report
from dpprof.result import Failure

MESSAGE_LIMIT = 2_000

_OUT_OF_MEMORY = re.compile(
    r"out of memory|can't allocate memory|cannot allocate memory|not enough memory"
    r"|std::bad_alloc|CUBLAS_STATUS_ALLOC_FAILED|CUDNN_STATUS_ALLOC_FAILED",
    re.IGNORECASE,
)
_REQUESTED = re.compile(r"tried to allocate ([\d.]+) ?(bytes|KiB|MiB|GiB|TiB)", re.IGNORECASE)
_UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def _die_with(supervisor_pid: int) -> None:
    """Have the kernel kill this process when its supervisor dies (Linux)."""
    if sys.platform == "linux":
        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != supervisor_pid:
        sys.exit("the supervisor is gone")


def is_out_of_memory(error: BaseException) -> bool:
    """Tell memory exhaustion from other failures, by type first and by message second."""
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    return isinstance(error, RuntimeError | ImportError | OSError) and bool(
        _OUT_OF_MEMORY.search(str(error))
    )


def requested_bytes(message: str) -> int | None:
    """Read the size of the failed allocation out of an allocator's message."""
    found = _REQUESTED.search(message)
    return int(float(found.group(1)) * _UNITS[found.group(2).lower()]) if found else None


def _lift_memory_limit() -> None:
    """Make room again for writing the report, once the limit has done its work."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))


def _allocator_state() -> dict[str, int]:
    """Read what the CUDA allocator holds at the time of a failure; empty without CUDA."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return {}
    return {
        "allocated_bytes": torch.cuda.memory_allocated(),
        "reserved_bytes": torch.cuda.memory_reserved(),
    }


def _describe(error: BaseException, mark: PhaseMark) -> Failure:
    message = str(error)[:MESSAGE_LIMIT]
    memory = is_out_of_memory(error)
    return Failure(
        kind=type(error).__name__,
        message=message,
        phase=mark.read(),
        requested_bytes=requested_bytes(message) if memory else None,
        **(_allocator_state() if memory else {}),
    )


def run(experiment: Experiment, instrument: str, mark: PhaseMark) -> Report:
    """Run one experiment under one instrument and tell what came of it; raises nothing."""
    try:
        reason = catalogue.why_unsupported(experiment)
        if reason is not None:
            raise catalogue.UnsupportedError(reason)  # noqa: TRY301 (one way to refuse)
        measurement = catalogue.load("instruments", instrument)(experiment, mark.enter)
    except catalogue.UnsupportedError as error:
        return Report(outcome="unsupported", error=_describe(error, mark))
    except BaseException as error:  # noqa: BLE001 (every way to fail is an outcome)
        _lift_memory_limit()
        traceback.print_exc()
        outcome = "oom" if is_out_of_memory(error) else "crashed"
        return Report(outcome=outcome, error=_describe(error, mark))
    return Report(outcome="ok", measurement=measurement)


def main() -> None:
    """Carry out the assignment on the command line."""
    faulthandler.enable()
    assignment = Assignment.model_validate_json(sys.argv[1])
    _die_with(assignment.supervisor_pid)
    mark = PhaseMark(assignment.phase_fd)
    report = run(assignment.experiment, assignment.instrument, mark)
    _lift_memory_limit()
    with os.fdopen(assignment.report_fd, "w", encoding="utf-8") as file:
        file.write(report.model_dump_json())


if __name__ == "__main__":
    main()
