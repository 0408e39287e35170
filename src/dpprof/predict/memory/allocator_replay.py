"""What a training allocates and frees, placed by the simulated caching allocator.

The last step is repeated until the allocator reserves nothing more for it. That is the pattern
that a long training shows. A step that is captured as a CUDA graph is played once, into a pool of
its own: its replays allocate nothing.
"""

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple, Self

from dpprof.experiments.records.step_costs import Allocator
from dpprof.predict.memory.atoms import Recording
from dpprof.predict.memory.caching_allocator import (
    CachingAllocator,
    OutOfMemoryError,
    SimulatedPeaks,
)
from dpprof.predict.memory.events import Allocated, Event, Freed
from dpprof.subjects.models.blocks import NotAlikeError

MOST_STEPS = 10  # how often the last step is played at most, by default


class Placement(NamedTuple):
    """How the allocator places a training."""

    peaks: SimulatedPeaks  # the peaks of the last step that was played
    retries_in_last_step: int
    """How often the last step, and so every later one, released the cache to make room."""

    retries: int  # how often any step did. Where it is 0, a limit changes nothing.
    steps: int  # how many times the last step was played
    settled: bool  # whether the last step found all that it needed in what was reserved before it


class Footprint(NamedTuple):
    """The allocations of a training, from its set-up to a step in the steady state."""

    before: Sequence[Event]
    step: Sequence[Event]
    requested: Sequence[int]  # the bytes of each storage
    block_bytes: int = 1  # the allocator rounds sizes up to multiples of this
    is_graph: bool = False  # whether the step is captured as a CUDA graph

    @classmethod
    def of(cls, recording: Recording) -> Self:
        """Return the footprint of a recording, of allocations and releases alone."""

        def keep(events: Sequence[Event]) -> list[Event]:
            return [event for event in events if isinstance(event, Allocated | Freed)]

        steady, end = recording.marks[2:]
        return cls(
            keep(recording.events[:steady]),
            keep(recording.events[steady:end]),
            [storage.requested for storage in recording.storages],
            recording.block_bytes,
            recording.is_graph,
        )

    @property
    def totals(self) -> list[int]:
        """Live bytes before the step and after each of its events."""
        before = sum(map(self._change, self.before))
        return [*accumulate(map(self._change, self.step), initial=before)]

    @property
    def peak_bytes(self) -> int:
        """The most bytes at once in the step."""
        return max(self.totals)

    def _change(self, event: Event) -> int:
        if not isinstance(event, Allocated | Freed):
            return 0
        blocks = -(-self.requested[event.number] // self.block_bytes)
        return (blocks if isinstance(event, Allocated) else -blocks) * self.block_bytes

    def place(
        self,
        limit_bytes: int | None = None,
        *,
        expandable: bool = False,
        most_steps: int = MOST_STEPS,
    ) -> Placement:
        """Play the training into a new allocator.

        Without ``limit_bytes`` there is no limit. The step is played ``most_steps`` times at most.

        Raises:
            OutOfMemoryError: It finds no room for a request within the limit.
        """
        player = _Player(CachingAllocator(limit_bytes, expandable=expandable), self)
        allocator = player.allocator
        if self.is_graph:
            allocator.begin_graph()
            most_steps = 1
        steps, retries, settled = 0, 0, False
        while steps < most_steps and not settled:
            reserved, retries = allocator.reserved_bytes, allocator.retries
            allocator.reset_peaks()
            steps += 1
            player.play_step(self)
            now = allocator.reserved_bytes, allocator.retries
            settled = steps > 1 and now == (reserved, retries)
        return Placement(
            peaks=allocator.peaks,
            retries_in_last_step=allocator.retries - retries,
            retries=allocator.retries,
            steps=steps,
            settled=settled or self.is_graph,
        )

    def simulate(self, limit_bytes: int | None) -> Allocator:
        """State the allocator with and without expandable segments, and within a device's memory.

        The limit is what the device can give; None where that is not known.
        """
        free = self.place()
        fits: bool | None = None if limit_bytes is None else True
        retries: int | None = 0
        if limit_bytes is not None and free.peaks.reserved_bytes > limit_bytes:
            try:
                retries = self.place(limit_bytes).retries_in_last_step
            except OutOfMemoryError:
                fits, retries = False, None
        return Allocator(
            **free.peaks._asdict(),
            expandable_reserved_bytes=self.place(expandable=True).peaks.reserved_bytes,
            limit_bytes=limit_bytes,
            fits=fits,
            retries=retries,
            settled=free.settled,
        )


def replay(
    footprints: Sequence[Footprint],
    order: Sequence[int],
    *,
    limit_bytes: int | None = None,
    expandable: bool = False,
    empty_cache_every: int | None = None,
) -> list[int]:
    """Play a training whose steps differ; return the bytes that are reserved after each step.

    Args:
        footprints: Of one training with different batches.
        order: The place of each step's batch in ``footprints``.
        limit_bytes: What the allocator may reserve; None: no limit.
        expandable: Whether the allocator's segments are.
        empty_cache_every: Steps after which the cache is released; None: never.

    Raises:
        NotAlikeError: Steps leave different numbers of tensors to the next.
        OutOfMemoryError: A step finds no room for a request within the limit.
    """
    allocator = CachingAllocator(limit_bytes, expandable=expandable)
    player = _Player(allocator, footprints[0])
    reserved = []
    for step, place in enumerate(order, 1):
        player.play_step(footprints[place])
        if empty_cache_every is not None and step % empty_cache_every == 0:
            allocator.release_cache()
        reserved.append(allocator.reserved_bytes)
    return reserved


_Key = tuple[int, int]  # of what is allocated: the turn, and the storage's number in it


class _Player:
    """Plays the steps of a training into an allocator, after what comes before them.

    A step frees what the step before left to it: gradients, the last logits. Steps of one training
    leave equally many such tensors, so those that one frees are those that another left, in order.
    """

    def __init__(self, allocator: CachingAllocator, first: Footprint) -> None:
        self.allocator = allocator
        self._keys: dict[int, _Key] = {}  # the latest of each storage of the first footprint
        self._first, self._turn = first, 0
        self._matches: dict[int, dict[int, int]] = {}  # of each footprint, by its identity
        self._play(first, first.before, self._keys, {})
        self._left = [self._keys.get(number) for number in self._match(first)]

    def play_step(self, footprint: Footprint) -> None:
        """Play a step of the training.

        Raises:
            NotAlikeError: It frees another number of earlier tensors than the first footprint.
            OutOfMemoryError: It finds no room for a request.
        """
        match = self._match(footprint)
        if len(match) != len(self._left):
            raise NotAlikeError("steps leave different numbers of tensors to the next")
        self._turn += 1
        keys = self._keys if footprint is self._first else {}
        left = dict(zip(match, self._left, strict=True))
        self._play(footprint, footprint.step, keys, left)
        self._left = [keys.get(number) for number in match.values()]

    def _match(self, footprint: Footprint) -> dict[int, int]:
        if id(footprint) not in self._matches:
            self._matches[id(footprint)] = _match(footprint.step, footprint.requested)
        return self._matches[id(footprint)]

    def _play(
        self,
        footprint: Footprint,
        events: Iterable[Event],
        keys: dict[int, _Key],
        left: Mapping[int, _Key | None],
    ) -> None:
        for event in events:
            if isinstance(event, Allocated):
                key = keys[event.number] = self._turn, event.number
                self.allocator.allocate(key, footprint.requested[event.number])
            elif isinstance(event, Freed):
                freed = left.get(event.number) or keys.get(event.number)
                if freed is not None:
                    self.allocator.free(freed)


def _match(step: Sequence[Event], requested: Sequence[int]) -> dict[int, int]:
    """Match storages that a step frees without having allocated them with those that it leaves."""
    left = {event.number: None for event in step if isinstance(event, Allocated)}
    freed = []
    for event in step:
        if isinstance(event, Freed):
            if event.number in left:
                del left[event.number]
            else:
                freed.append(event.number)
    by_size: defaultdict[int, deque[int]] = defaultdict(deque)
    for number in left:
        by_size[requested[number]].append(number)
    return {
        number: by_size[requested[number]].popleft()
        for number in sorted(freed)
        if by_size[requested[number]]
    }
