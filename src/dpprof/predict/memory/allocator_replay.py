"""Recorded allocations, placed by the simulated caching allocator from the first one on.

The last step is repeated until the allocator reserves nothing more for it. That is the pattern
that a long training shows. A step that is captured as a CUDA graph is played once, into a pool of
its own: its replays allocate nothing.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from dpprof.experiments.records.step_costs import Allocator
from dpprof.predict.memory.caching_allocator import (
    DEFAULT,
    EXPANDABLE,
    CachingAllocator,
    OutOfMemoryError,
    Settings,
    SimulatedPeaks,
)
from dpprof.predict.memory.events import Allocated, Event, Freed

MOST_STEPS = 10
"""How often the last step is played at most, by default."""


class Placement(NamedTuple):
    """How the allocator places a training."""

    peaks: SimulatedPeaks
    """The peaks of the last step that was played."""

    retries_in_last_step: int
    """How often the last step, and so every later one, released the cache to make room."""

    retries: int
    """How often any step did. Where it is 0, a limit changes nothing."""

    steps: int
    """How many times the last step was played."""

    settled: bool
    """Whether the last step found all that it needed in what was reserved before it."""


def place(
    before: Iterable[Event],
    step: Sequence[Event],
    size_of: Callable[[int], int],
    limit_bytes: int | None = None,
    *,
    settings: Settings = DEFAULT,
    most_steps: int = MOST_STEPS,
    as_graph: bool = False,
) -> Placement:
    """Play a training's events into a new allocator.

    ``before`` has the events up to the last step, ``step`` those of it; ``size_of`` returns the
    bytes that a storage requested, by its number. Without ``limit_bytes`` there is no limit. The
    step is played ``most_steps`` times at most, and once ``as_graph``: captured as a CUDA graph.

    Raises:
        OutOfMemoryError: The allocator finds no room for a request.
    """
    allocator = CachingAllocator(limit_bytes, settings)
    player = _Player(allocator, size_of)
    player.play(before, {})
    predecessors = _match(step, size_of)
    if as_graph:
        allocator.begin_graph()
        most_steps = 1
    steps, retries, settled = 0, 0, False
    while steps < most_steps and not settled:
        reserved, retries = allocator.reserved_bytes, allocator.retries
        allocator.reset_peaks()
        keys = player.keys
        player.play(step, {n: keys[left] for n, left in predecessors.items() if left in keys})
        steps += 1
        now = allocator.reserved_bytes, allocator.retries
        settled = steps > 1 and now == (reserved, retries)
    in_last_step = allocator.retries - retries
    return Placement(allocator.peaks, in_last_step, allocator.retries, steps, settled or as_graph)


def summarise_allocator(place_step: Callable[..., Placement], limit_bytes: int | None) -> Allocator:
    """Simulate the allocator with and without expandable segments, and within the device's memory.

    ``place_step`` is ``place`` of a training, without a limit and settings. The limit is what the
    device can give; None where that is not known.
    """
    free = place_step()
    expandable = place_step(settings=EXPANDABLE)
    fits: bool | None = None if limit_bytes is None else True
    retries: int | None = 0
    if limit_bytes is not None and free.peaks.reserved_bytes > limit_bytes:
        try:
            retries = place_step(limit_bytes).retries_in_last_step
        except OutOfMemoryError:
            fits, retries = False, None
    return Allocator(
        requested_bytes=free.peaks.requested_bytes,
        allocated_bytes=free.peaks.allocated_bytes,
        reserved_bytes=free.peaks.reserved_bytes,
        expandable_reserved_bytes=expandable.peaks.reserved_bytes,
        limit_bytes=limit_bytes,
        fits=fits,
        retries=retries,
        settled=free.settled,
    )


class _Player:
    """Plays events; a storage that is allocated again gets a new key."""

    def __init__(self, allocator: CachingAllocator, size_of: Callable[[int], int]) -> None:
        self.keys: dict[int, tuple[int, int]] = {}
        """The allocator's latest key of each storage, by the storage's number."""

        self._allocator = allocator
        self._size_of = size_of
        self._turn = 0

    def play(self, events: Iterable[Event], inherited: Mapping[int, tuple[int, int]]) -> None:
        """Play events once.

        Args:
            events: The events.
            inherited: Keys that the previous turn left, by the number whose release frees them.
        """
        self._turn += 1
        turn, keys, size_of = self._turn, self.keys, self._size_of
        allocate, free = self._allocator.allocate, self._allocator.free
        for event in events:
            if isinstance(event, Allocated):
                number = event.number
                key = keys[number] = turn, number
                allocate(key, size_of(number))
            elif isinstance(event, Freed):
                number = event.number
                left = inherited.get(number) or keys.get(number)
                if left is not None:
                    free(left)


def _match(step: Sequence[Event], size_of: Callable[[int], int]) -> dict[int, int]:
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
        by_size[size_of(number)].append(number)
    return {
        number: by_size[size_of(number)].popleft()
        for number in sorted(freed)
        if by_size[size_of(number)]
    }
