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
    DEFAULT,
    EXPANDABLE,
    CachingAllocator,
    OutOfMemoryError,
    Settings,
    SimulatedPeaks,
)
from dpprof.predict.memory.events import Allocated, Event, Freed

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
        settings: Settings = DEFAULT,
        most_steps: int = MOST_STEPS,
    ) -> Placement:
        """Play the training into a new allocator.

        Without ``limit_bytes`` there is no limit. The step is played ``most_steps`` times at most.

        Raises:
            OutOfMemoryError: It finds no room for a request within the limit.
        """
        allocator = CachingAllocator(limit_bytes, settings)
        keys: dict[int, tuple[int, int]] = {}  # the latest of each storage; each turn has its own

        def play(events: Iterable[Event], turn: int, left: Mapping[int, tuple[int, int]]) -> None:
            """Play events; ``left`` has keys of the turn before, by whose release frees them."""
            for event in events:
                if isinstance(event, Allocated):
                    number = event.number
                    key = keys[number] = turn, number
                    allocator.allocate(key, self.requested[number])
                elif isinstance(event, Freed):
                    freed = left.get(event.number) or keys.get(event.number)
                    if freed is not None:
                        allocator.free(freed)

        play(self.before, 0, {})
        predecessors = _match(self.step, self.requested)
        if self.is_graph:
            allocator.begin_graph()
            most_steps = 1
        steps, retries, settled = 0, 0, False
        while steps < most_steps and not settled:
            reserved, retries = allocator.reserved_bytes, allocator.retries
            allocator.reset_peaks()
            steps += 1
            left = {n: keys[before] for n, before in predecessors.items() if before in keys}
            play(self.step, steps, left)
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
            expandable_reserved_bytes=self.place(settings=EXPANDABLE).peaks.reserved_bytes,
            limit_bytes=limit_bytes,
            fits=fits,
            retries=retries,
            settled=free.settled,
        )


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
