"""What a training allocates and frees, whatever it computes."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, Self

from dpprof.predict.memory.allocator_replay import Placement, place
from dpprof.predict.memory.atoms import Recording
from dpprof.predict.memory.caching_allocator import DEFAULT, Settings
from dpprof.predict.memory.events import Allocated, Event, Freed


class Footprint(NamedTuple):
    """The allocations of a training, from its set-up to a step in the steady state."""

    before: Sequence[Event]
    step: Sequence[Event]
    requested: Mapping[int, int]
    """The bytes of each storage."""

    block_bytes: int
    """The allocator rounds sizes up to multiples of this."""

    is_graph: bool = False
    """Whether the step is captured as a CUDA graph."""

    @classmethod
    def of(cls, recording: Recording) -> Self:
        """Return the footprint of a recording."""

        def keep(events: Iterable[Event]) -> list[Event]:
            return [event for event in events if isinstance(event, Allocated | Freed)]

        steady, end = recording.marks[2:]
        return cls(
            keep(recording.events[:steady]),
            keep(recording.events[steady:end]),
            {number: storage.requested for number, storage in enumerate(recording.storages)},
            recording.block_bytes,
            recording.is_graph,
        )

    @property
    def peak_bytes(self) -> int:
        """The most bytes at once in the step."""
        before = sum(map(self._change, self.before))
        return max(accumulate(map(self._change, self.step), initial=before))

    def _change(self, event: Event) -> int:
        assert isinstance(event, Allocated | Freed)
        blocks = -(-self.requested[event.number] // self.block_bytes)
        return (blocks if isinstance(event, Allocated) else -blocks) * self.block_bytes

    def place(self, limit_bytes: int | None, settings: Settings = DEFAULT) -> Placement:
        """Play the training into a new allocator.

        Raises:
            OutOfMemoryError: It finds no room for a request within the limit.
        """
        size_of = self.requested.__getitem__
        return place(
            *(self.before, self.step, size_of, limit_bytes),
            settings=settings,
            as_graph=self.is_graph,
        )
