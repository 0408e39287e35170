"""The host as a device: a wall clock, a memory limit, and an allocator without counters.

PyTorch's CPU allocator reports every allocation and release to torch.profiler, so the peaks of a
recording are exact. Earlier allocations are unknown, so a process makes one recording, which starts
before the model exists.

gloo works on threads of its own, which drop their references to a collective's tensors some moments
after it has ended. If the last reference is dropped there, a tensor is freed later than its step
says, and the profiler, which follows one thread, counts its bytes for ever. So collectives are
settled.
"""

import resource
import time
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from itertools import accumulate
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.target import Dtype
from dpprof.experiments.records.result import Energy
from dpprof.measure.devices.device import (
    AllocatorPeaks,
    AllocatorRecorder,
    Counters,
    Device,
    NoEnergyError,
    Recorded,
)
from dpprof.private.errors import UnsupportedError

_THREAD = "pt_gloo_runloop"
_POLL_S = 1e-5
_PATIENCE_S = 1.0


def settled_collectives() -> AbstractContextManager[Any]:
    """Settle the collectives within, where there are ranks that gloo connects."""
    is_gloo = distributed.is_initialized() and distributed.get_backend() == distributed.Backend.GLOO
    return _SettledCollectives() if is_gloo else nullcontext()  # type: ignore[no-untyped-call]


class _SettledCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets each collective within return when gloo's threads have finished with its tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator; after a collective, wait for its work and then for the threads."""
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # it calls operators on its shard, which come back here
        out = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            for part in out if isinstance(out, tuple) else (out,):
                if isinstance(part, torch.ScriptObject):  # the work, which still holds the tensors
                    part.wait()  # type: ignore[attr-defined]
            _wait_for_threads()
        return out


def _wait_for_threads() -> None:
    """Wait until all of gloo's threads sleep: they do when they have dropped their last work."""
    end = time.monotonic() + _PATIENCE_S
    while time.monotonic() < end:
        stats = (stat.read_text() for stat in Path("/proc/self/task").glob("*/stat"))
        # proc(5): a number, the thread's name in brackets, and its state.
        threads = (stat.partition("(")[2].rpartition(")") for stat in stats)
        if all(name != _THREAD or rest.split()[0] == "S" for name, _, rest in threads):
            return
        time.sleep(_POLL_S)


_WINDOW = "dpprof window:"
_MARK = "dpprof mark:"


class CpuRecorder(AllocatorRecorder):
    """A recording by the profiler, one for each process."""

    def __init__(self) -> None:
        # With shapes or stacks the profiler itself would keep tensors alive.
        self._profile = profile(activities=[ProfilerActivity.CPU], profile_memory=True)
        self._profile.start()
        self._settling = ExitStack()
        self._settling.enter_context(settled_collectives())

    @contextmanager
    def window(self, name: str) -> Iterator[None]:
        """Record the peak inside the context."""
        with record_function(f"{_WINDOW}{name}"):
            yield

    def read(self, name: str) -> Counters:
        """Mark this instant; its counters are known once the recording is closed."""
        with record_function(f"{_MARK}{name}"):
            return Counters()

    def close(self) -> Recorded:
        """End the recording and return its peaks and counters."""
        self._settling.close()
        self._profile.stop()
        assert self._profile.profiler is not None
        assert self._profile.profiler.kineto_results is not None
        changes: list[tuple[int, int]] = []
        windows: list[tuple[int, int, str]] = []
        marks: list[tuple[int, str]] = []
        event: Any  # the type's stub is incomplete
        for event in self._profile.profiler.kineto_results.events():
            name, start_ns = event.name(), event.start_ns()
            if name == "[memory]" and event.device_type().name == "CPU":
                changes.append((start_ns, event.nbytes()))
            elif name.startswith(_WINDOW):
                windows.append((start_ns, event.end_ns(), name.removeprefix(_WINDOW)))
            elif name.startswith(_MARK):
                marks.append((start_ns, name.removeprefix(_MARK)))
        changes.sort(key=itemgetter(0))
        instants = [at_ns for at_ns, _ in changes]
        levels = list(accumulate((size for _, size in changes), initial=0))
        """Allocated bytes before the first change and after each."""

        def after(at_ns: int) -> int:
            return bisect_right(instants, at_ns)

        return Recorded(
            peaks={
                name: AllocatorPeaks(max(levels[after(start_ns) : after(end_ns) + 1]))
                for start_ns, end_ns, name in sorted(windows)
            },
            counters={name: Counters(levels[after(at_ns)]) for at_ns, name in sorted(marks)},
        )


_NO_POOL = "PyTorch's CPU allocator reserves nothing and retries nothing"
_NO_COUNTER = "PyTorch's CPU allocator keeps no counters; the instrument phases follows it"


class Cpu(Device):
    """The host's processor and memory."""

    def __init__(self) -> None:
        self.torch_device = torch.device("cpu")
        self.reasons_recorded = {
            "memory.peak_reserved_bytes": _NO_POOL,
            "memory.snapshots.reserved_bytes": _NO_POOL,
            "memory.peak_device_used_bytes": "the CPU has no memory apart from the host's",
            "memory.alloc_retries": _NO_POOL,
        }
        self.reasons = self.reasons_recorded | {
            "memory.peak_allocated_bytes": _NO_COUNTER,
            "memory.first_step_peak_allocated_bytes": _NO_COUNTER,
            "memory.snapshots.allocated_bytes": _NO_COUNTER,
        }

    def prepare(self, experiment: Experiment) -> None:
        """Limit the process's private writable memory.

        The limit is RLIMIT_DATA: an allocation beyond it fails with "can't allocate memory", as on
        a host without more memory. The compute threads start before the limit applies, because
        OpenMP ends the process if it cannot allocate a thread's stack.
        """
        if experiment.memory_limit_bytes is not None:
            torch.ones(2**20).sum()
            _, hard = resource.getrlimit(resource.RLIMIT_DATA)
            resource.setrlimit(resource.RLIMIT_DATA, (int(experiment.memory_limit_bytes), hard))

    def use_precision(self, dtype: Dtype) -> None:
        """Refuse tf32; the CPU computes products of float32 in IEEE's precision."""
        if dtype == "tf32":
            raise UnsupportedError("a mode of CUDA matrix products")

    def recorder(self) -> CpuRecorder:
        """Record the allocator's work by the profiler."""
        return CpuRecorder()

    def energy(self, run: Callable[[], object], step_s: float) -> Energy:  # noqa: ARG002 (what a device offers)
        """Refuse, because NVML counts the energy of GPUs only."""
        raise NoEnergyError("NVML counts the energy of NVIDIA GPUs, and this is a CPU")
