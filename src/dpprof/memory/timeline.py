"""The memory timeline: events replayed into who owned what at every instant of a step."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from types import CodeType
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from dpprof.memory.owners import Owner, find_owner
from dpprof.memory.recorder import (
    Born,
    Died,
    Entered,
    Event,
    Op,
    Recorder,
    Saved,
    Storage,
    Unsaved,
)
from dpprof.records.terms import COMPONENTS, Component, Phase

_COLUMN = {component: column for column, component in enumerate(COMPONENTS)}


class Holding(NamedTuple):
    """A storage that was alive at an instant, with its owner."""

    storage: Storage
    owner: Owner


class MemoryTimeline:
    """One step's worth of events, replayed.

    Args:
        recorder: What was recorded, from before the model existed.
        births: Components by the code of the function in which they are born.
        window: The step's first event, and the one after its last.
    """

    def __init__(
        self, recorder: Recorder, births: Mapping[CodeType, Component], window: tuple[int, int]
    ) -> None:
        self.notes = recorder.notes
        self._storages = recorder.storages
        self._births = births
        self._before = recorder.events[: window[0]]
        self.events: Sequence[Event] = recorder.events[window[0] : window[1]]
        self._owners: dict[tuple[int, bool], Owner] = {}

    def owner(self, number: int, *, saved: bool) -> Owner:
        """Say who owns a storage while autograd keeps it, or while it does not."""
        key = number, saved
        if key not in self._owners:
            self._owners[key] = find_owner(
                self._storages[number],
                self._births,
                saved=saved,
                transient=number in self._transients,
            )
        return self._owners[key]

    @cached_property
    def _transients(self) -> set[int]:
        return _find_transients((*self._before, *self.events))

    @cached_property
    def balances(self) -> npt.NDArray[np.int64]:
        """Bytes of each component (columns) before the step and after each event (rows)."""
        rows = np.zeros((len(self.events) + 1, len(COMPONENTS)), dtype=np.int64)
        state = _State(self)
        state.follow(self._before)
        rows[0] = state.sums
        for row, event in enumerate(self.events, start=1):
            state.apply(event)
            rows[row] = state.sums
        return rows

    @cached_property
    def totals(self) -> npt.NDArray[np.int64]:
        """Bytes alive before the step and after each event."""
        before = sum(self._change(event) for event in self._before)
        return np.cumsum([before, *(self._change(event) for event in self.events)])

    def _change(self, event: Event) -> int:
        match event:
            case Born(number):
                return self._storages[number].nbytes
            case Died(number):
                return -self._storages[number].nbytes
            case _:
                return 0

    @property
    def peak_row(self) -> int:
        """The first row in which most is alive."""
        return int(self.totals.argmax())

    @property
    def peak_bytes(self) -> int:
        """The most that was alive at once."""
        return int(self.totals.max())

    @property
    def is_steady(self) -> bool:
        """Whether the step left as much behind as it found."""
        return bool(self.totals[0] == self.totals[-1])

    @cached_property
    def phases(self) -> list[Phase]:
        """The phase of each row; before anything was entered, ``setup``."""
        entered = [event.phase for event in self._before if isinstance(event, Entered)]
        phase: Phase = entered[-1] if entered else "setup"
        found = [phase]
        for event in self.events:
            phase = event.phase if isinstance(event, Entered) else phase
            found.append(phase)
        return found

    @property
    def peak_storage(self) -> Storage | None:
        """The storage whose birth made the peak; None if the step began with it."""
        row = self.peak_row
        if not row:
            return None
        event = self.events[row - 1]
        assert isinstance(event, Born)  # nothing else adds to what is alive
        return self._storages[event.number]

    def holdings_at_peak(self) -> list[Holding]:
        """List what was alive at the peak."""
        state = _State(self)
        state.follow(self._before)
        state.follow(self.events[: self.peak_row])
        return [
            Holding(self._storages[number], self.owner(number, saved=state.saved[number] > 0))
            for number in state.alive
        ]

    @property
    def ops(self) -> list[Op]:
        """The operators that ran."""
        return [event for event in self.events if isinstance(event, Op)]

    def component_of(self, number: int) -> Component:
        """Name a storage's component over its life: the one that it has while it is saved."""
        ever_saved = number in self._ever_saved
        return self.owner(number, saved=ever_saved).component if number >= 0 else "unattributed"

    @cached_property
    def _ever_saved(self) -> set[int]:
        every = (*self._before, *self.events)
        return {event.number for event in every if isinstance(event, Saved)}


class _State:
    """What is alive, and who owns how much of it."""

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
            case Born(number):
                self._settle(number)
            case Died(number):
                self._take(number)
            case Saved(number):
                self.saved[number] += 1
                self._settle_again(number)
            case Unsaved(number):
                self.saved[number] -= 1
                self._settle_again(number)

    def _settle_again(self, number: int) -> None:
        if number in self.alive:
            self._take(number)
            self._settle(number)

    def _settle(self, number: int) -> None:
        component = self._step.owner(number, saved=self.saved[number] > 0).component
        self.alive[number] = component
        self.sums[_COLUMN[component]] += self._step._storages[number].nbytes  # noqa: SLF001

    def _take(self, number: int) -> None:
        component = self.alive.pop(number)
        self.sums[_COLUMN[component]] -= self._step._storages[number].nbytes  # noqa: SLF001


def _find_transients(events: Iterable[Event]) -> set[int]:
    """Find the storages that died in the very phase in which they were born."""
    born_in: dict[int, int] = {}
    transient: set[int] = set()
    phase = 0
    for event in events:
        match event:
            case Entered():
                phase += 1
            case Born(number):
                born_in[number] = phase
            case Died(number) if born_in.get(number) == phase:
                transient.add(number)
    return transient
