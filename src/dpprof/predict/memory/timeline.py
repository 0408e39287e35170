"""The memory timeline: live bytes by component after every event of a step."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from types import CodeType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dpprof.experiments.records.terms import COMPONENTS, Component, Phase
from dpprof.predict.memory.allocator_replay import Footprint
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

Bytes = npt.NDArray[np.int64]


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
        further_batches: How many more batches the step accumulates than were recorded, which are
            three then; each is as the second.
    """

    def __init__(
        self,
        recorded: Recorder | Recording,
        births: Mapping[CodeType, Component],
        window: tuple[int, int],
        further_batches: int = 0,
    ) -> None:
        self._further_batches = further_batches
        self.notes = recorded.notes
        self._storages = recorded.storages
        self._births = births
        self.before: Sequence[Event] = recorded.events[: window[0]]
        """What was recorded before the step, from the first allocation on."""

        self.events: Sequence[Event] = recorded.events[window[0] : window[1]]
        requested = [storage.requested for storage in self._storages]
        self.footprint = Footprint(self.before, self.events, requested, recorded.block_bytes)
        self._owners: dict[tuple[int, bool], Owner] = {}

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

    def _play(self, events: Iterable[Event]) -> Iterator[tuple[dict[int, Owner], Bytes]]:
        """Yield the owners of all live storages, and bytes by component, after each event."""
        alive: dict[int, Owner] = {}
        saved: Counter[int] = Counter()
        sums = np.zeros(len(COMPONENTS), dtype=np.int64)

        def end(number: int) -> None:
            owner = alive.pop(number)
            sums[_COLUMN[owner.component]] -= self._storages[number].nbytes

        def begin(number: int) -> None:
            owner = alive[number] = self.owner(number, saved=saved[number] > 0)
            sums[_COLUMN[owner.component]] += self._storages[number].nbytes

        for event in events:
            match event:
                case Allocated(number):
                    begin(number)
                case Freed(number):
                    end(number)
                case Saved(number) | Unsaved(number):
                    saved[number] += 1 if isinstance(event, Saved) else -1
                    if number in alive:
                        end(number)
                        begin(number)
            yield alive, sums

    @cached_property
    def balances(self) -> Bytes:
        """Live bytes of each component (columns) before the step and after each event (rows)."""
        rows = np.zeros((len(self.events) + 1, len(COMPONENTS)), dtype=np.int64)
        states = self._play((*self.before, *self.events))
        for row, (_, sums) in enumerate(states, start=1 - len(self.before)):
            rows[max(row, 0)] = sums
        return rows

    @cached_property
    def totals(self) -> Bytes:
        """Live bytes before the step and after each event."""
        return np.array(self.footprint.totals)

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
        if not self.peak_row:
            return None
        event = self.events[self.peak_row - 1]
        assert isinstance(event, Allocated)  # nothing else adds live bytes
        return self._storages[event.number]

    @cached_property
    def live_at_peak(self) -> list[LiveStorage]:
        """The storages that are live at the peak."""
        *_, (alive, _) = self._play((*self.before, *self.events[: self.peak_row]))
        return [LiveStorage(self._storages[number], owner) for number, owner in alive.items()]

    @property
    def ops(self) -> list[Op]:
        """The operators of the step."""
        ops = [event for event in self.events if isinstance(event, Op)]
        if not self._further_batches:
            return ops
        phases = [None, *(op.phase for op in ops)]
        starts = [i for i in range(len(ops)) if phases[i] != phases[i + 1] == "forward"]
        second, third = starts[1:]
        return ops[:third] + self._further_batches * ops[second:third] + ops[third:]

    def component_of(self, number: int) -> Component:
        """Return the component of a storage; if autograd ever keeps it, the one at that time."""
        ever_saved = number in self._ever_saved
        return self.owner(number, saved=ever_saved).component if number >= 0 else "unattributed"

    @cached_property
    def _ever_saved(self) -> set[int]:
        events = (*self.before, *self.events)
        return {event.number for event in events if isinstance(event, Saved)}
