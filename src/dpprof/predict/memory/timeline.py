"""The memory timeline: live bytes by component after every event of a step."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from types import CodeType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dpprof.experiments.records.terms import COMPONENTS, Component, Phase
from dpprof.predict.memory.atoms import Recording
from dpprof.predict.memory.events import (
    Allocated,
    Entered,
    Event,
    Freed,
    Op,
    Saved,
    Storage,
    Unsaved,
)
from dpprof.predict.memory.owners import Owner, find_owner
from dpprof.predict.memory.recorder import Recorder

_COLUMN = {component: column for column, component in enumerate(COMPONENTS)}


class LiveStorage(NamedTuple):
    """A storage that is live at an instant, with its owner."""

    storage: Storage
    owner: Owner


class MemoryTimeline:
    """The memory of one step, from recorded events.

    Args:
        recorded: The storages, events and notes from before the model existed on.
        births: Components by the code of the function that allocates them.
        window: Indices of the step's first event and of the one after its last.
    """

    def __init__(
        self,
        recorded: Recorder | Recording,
        births: Mapping[CodeType, Component],
        window: tuple[int, int],
    ) -> None:
        self.notes = recorded.notes
        self._storages = recorded.storages
        self._births = births
        self.before: Sequence[Event] = recorded.events[: window[0]]
        """What was recorded before the step, from the first allocation on."""

        self.events: Sequence[Event] = recorded.events[window[0] : window[1]]
        self._owners: dict[tuple[int, bool], Owner] = {}

    def requested_bytes(self, number: int) -> int:
        """Return the bytes that a storage requested from the allocator."""
        return self._storages[number].requested

    def owner(self, number: int, *, saved: bool) -> Owner:
        """Return the owner of a storage while autograd keeps it, or while it does not."""
        key = number, saved
        if key not in self._owners:
            self._owners[key] = find_owner(
                self._storages[number],
                self._births,
                saved=saved,
                temporary=number in self._temporaries,
            )
        return self._owners[key]

    @cached_property
    def _temporaries(self) -> set[int]:
        """The storages that were freed in the phase in which they were allocated."""
        allocated_in: dict[int, int] = {}
        temporary: set[int] = set()
        phase = 0
        for event in (*self.before, *self.events):
            match event:
                case Entered():
                    phase += 1
                case Allocated(number):
                    allocated_in[number] = phase
                case Freed(number) if allocated_in.get(number) == phase:
                    temporary.add(number)
        return temporary

    @cached_property
    def balances(self) -> npt.NDArray[np.int64]:
        """Live bytes of each component (columns) before the step and after each event (rows)."""
        rows = np.zeros((len(self.events) + 1, len(COMPONENTS)), dtype=np.int64)
        state = _State(self)
        state.follow(self.before)
        rows[0] = state.sums
        for row, event in enumerate(self.events, start=1):
            state.apply(event)
            rows[row] = state.sums
        return rows

    @cached_property
    def totals(self) -> npt.NDArray[np.int64]:
        """Live bytes before the step and after each event."""
        signs = {Allocated: 1, Freed: -1}
        changes = [
            signs[type(event)] * self._storages[event.number].nbytes
            if isinstance(event, Allocated | Freed)
            else 0
            for event in (*self.before, *self.events)
        ]
        return np.cumsum([0, *changes])[len(self.before) :]

    @property
    def peak_row(self) -> int:
        """The first row with the most live bytes."""
        return int(self.totals.argmax())

    @property
    def peak_bytes(self) -> int:
        """The most live bytes at once."""
        return int(self.totals.max())

    @cached_property
    def phases(self) -> list[Phase]:
        """The phase of each row; ``setup`` before the first phase."""
        phase: Phase = "setup"
        phases = [phase]
        for event in (*self.before, *self.events):
            phase = event.phase if isinstance(event, Entered) else phase
            phases.append(phase)
        return phases[len(self.before) :]

    @property
    def peak_storage(self) -> Storage | None:
        """The storage whose allocation made the peak; None if the step began at its peak."""
        row = self.peak_row
        if not row:
            return None
        event = self.events[row - 1]
        assert isinstance(event, Allocated)  # nothing else adds live bytes
        return self._storages[event.number]

    def live_storages_at_peak(self) -> list[LiveStorage]:
        """Return the storages that are live at the peak."""
        state = _State(self)
        state.follow((*self.before, *self.events[: self.peak_row]))
        return [
            LiveStorage(self._storages[number], self.owner(number, saved=state.saved[number] > 0))
            for number in state.alive
        ]

    @property
    def ops(self) -> list[Op]:
        """The operators that ran."""
        return [event for event in self.events if isinstance(event, Op)]

    def component_of(self, number: int) -> Component:
        """Return the component of a storage; if autograd ever keeps it, the one at that time."""
        ever_saved = number in self._ever_saved
        return self.owner(number, saved=ever_saved).component if number >= 0 else "unattributed"

    @cached_property
    def _ever_saved(self) -> set[int]:
        events = (*self.before, *self.events)
        return {event.number for event in events if isinstance(event, Saved)}


class _State:
    """The live storages, and the bytes of each component."""

    def __init__(self, step: MemoryTimeline) -> None:
        self._step = step
        self.alive: dict[int, Component] = {}
        self.saved: Counter[int] = Counter()
        self.sums = np.zeros(len(COMPONENTS), dtype=np.int64)

    def follow(self, events: Iterable[Event]) -> None:
        """Apply events in their order."""
        for event in events:
            self.apply(event)

    def apply(self, event: Event) -> None:
        """Apply one event."""
        match event:
            case Allocated(number):
                self._add(number)
            case Freed(number):
                self._remove(number)
            case Saved(number) | Unsaved(number):
                self.saved[number] += 1 if isinstance(event, Saved) else -1
                if number in self.alive:
                    self._remove(number)
                    self._add(number)

    def _add(self, number: int) -> None:
        component = self._step.owner(number, saved=self.saved[number] > 0).component
        self.alive[number] = component
        self.sums[_COLUMN[component]] += self._step._storages[number].nbytes  # noqa: SLF001

    def _remove(self, number: int) -> None:
        component = self.alive.pop(number)
        self.sums[_COLUMN[component]] -= self._step._storages[number].nbytes  # noqa: SLF001
