"""Records a program as if on a CUDA device, and reads the allocator's counters off the record."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor, nn

from dpprof.experiments.config.target import Target
from dpprof.experiments.records.terms import Phase
from dpprof.predict.memory.caching_allocator import CachingAllocator
from dpprof.predict.memory.events import Allocated, Freed, Op
from dpprof.predict.memory.recorder import Recorder
from dpprof.predict.tracing import tracing

DATA = Path(__file__).parent / "data"
MIB = 2**20


class Tape:
    """What a program is given: it marks instants, and tells where the optimizer runs."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.marks: dict[str, int] = {}

    def mark(self, name: str) -> None:
        """Name the present instant; operators count from ``last step`` to ``stepped``."""
        self.marks[name] = len(self._recorder.events)
        if name in ("last step", "stepped"):
            self._recorder.counting = name == "last step"

    def load(self, build: Callable[..., Any], *arguments: Any) -> Any:
        """Build a model on the host, and load it: what is frozen, and then what is trained."""
        model = self.build(build, *arguments)
        parameters = [*model.parameters()]
        self.hold(*model.buffers(), *(p for p in parameters if not p.requires_grad))
        self.hold(*(p for p in parameters if p.requires_grad))
        return model

    def build(self, build: Callable[..., Any], *arguments: Any) -> Any:
        """Build a model on the host, and record nothing of it."""
        self._recorder.recording = False
        model = build(*arguments)
        self._recorder.recording = True
        return model

    def hold(self, *tensors: Tensor) -> None:
        """Say that tensors of the host are allocated on the device now."""
        held = nn.Module()
        for number, tensor in enumerate(tensors):
            held.register_buffer(f"tensor_{number}", tensor.detach())
        self._recorder.load(held)

    @contextmanager
    def phase(self, name: Phase) -> Iterator[None]:
        """Say which phase of a step runs within: in ``step``, scalars live on the host."""
        self.enter(name)
        yield
        self.enter("forward")

    def enter(self, name: Phase) -> None:
        """Say that a phase begins."""
        self._recorder.enter(name)

    @contextmanager
    def left_out(self) -> Iterator[None]:
        """Leave operators within out of a step's."""
        counting, self._recorder.counting = self._recorder.counting, False
        yield
        self._recorder.counting = counting


class Recording:
    """What was allocated and freed, and the counters at each instant; bytes.

    Args:
        changes: Key and signed bytes, in order; negative bytes free the key.
        marks: Instants by name, as the number of changes before them.
        ops: The operators of the last step.
    """

    def __init__(
        self, changes: list[tuple[int, int]], marks: dict[str, int], ops: list[Op]
    ) -> None:
        self.changes = changes
        self.marks = marks
        self.ops = ops

    @cached_property
    def requested(self) -> np.ndarray:
        """Sizes rounded up to 512 bytes that are alive."""
        return np.cumsum([0, *(size for _, size in self.changes)])

    @cached_property
    def _simulated(self) -> np.ndarray:
        allocator = CachingAllocator()
        rows = [(0, 0)]
        for key, size in self.changes:
            if size > 0:
                allocator.allocate(key, size)
            else:
                allocator.free(key)
            rows.append((allocator.allocated_bytes, allocator.reserved_bytes))
        return np.array(rows)

    @property
    def allocated(self) -> np.ndarray:
        """Whole blocks that are in use."""
        return self._simulated[:, 0]

    @property
    def reserved(self) -> np.ndarray:
        """Segments."""
        return self._simulated[:, 1]

    def at(self, counter: str, mark: str = "end") -> float:
        """Read a counter at an instant; MiB."""
        return float(getattr(self, counter)[self.marks[mark]]) / MIB

    def peak(self, counter: str, since: str = "start", until: str = "end") -> float:
        """Read the most that a counter showed between two instants; MiB."""
        values = getattr(self, counter)
        return float(values[self.marks[since] : self.marks[until] + 1].max()) / MIB


def record(
    program: Callable[..., None], target: Target, *, with_handles: bool = True, **settings: Any
) -> Recording:
    """Run a program under fake tensors as if on a target.

    Args:
        program: What to run.
        target: The GPU.
        with_handles: Whether PyTorch allocates the workspaces of cuBLAS, as it does since 1.13.
        **settings: Of the program.
    """
    with tracing(target) as recorder:
        if not with_handles:
            recorder.handles = {}
        tape = Tape(recorder)
        tape.mark("start")
        recorder.enter("forward")
        program(tape, **settings)
        tape.mark("end")
    return _shorten(recorder, tape.marks)


def record_step(program: Callable[..., None], target: Target, **settings: Any) -> list[Op]:
    """Run a program under fake tensors as if on a target; returns its last step's operators."""
    return record(program, target, **settings).ops


def _shorten(recorder: Recorder, marks: dict[str, int]) -> Recording:
    """Keep allocations and frees."""
    changes: list[tuple[int, int]] = []
    instants = {0: 0}
    for index, event in enumerate(recorder.events, start=1):
        match event:
            case Allocated(number):
                changes.append((number, recorder.storages[number].nbytes))
            case Freed(number):
                changes.append((number, -recorder.storages[number].nbytes))
        instants[index] = len(changes)
    ops = [event for event in recorder.events if isinstance(event, Op)]
    return Recording(changes, {name: instants[index] for name, index in marks.items()}, ops)
