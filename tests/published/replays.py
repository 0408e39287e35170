"""Recorded CUDA snapshots, played through the simulated allocator.

A snapshot begins in the middle of a training, so what was allocated before it is unknown but for
its total. It is put together from what is known: cuBLAS's workspaces, parameters (and gradients or
optimizer state, where the events do not free them), and what the events free without having
allocated it. The events are then played some times over, since the training had run some steps.
"""

import gzip
import json
from collections import defaultdict, deque
from functools import cached_property
from typing import Any, NamedTuple

from published.recording import DATA

from dpprof.predict.memory.caching_allocator import CachingAllocator, round_size

_FOLDER = DATA / "replays"
_WORKSPACE = 8320 * 2**10
_FLOAT32 = 4
TURNS = 5


class Played(NamedTuple):
    """The allocator's counters after the last event; bytes."""

    allocated: int
    reserved: int


class Replay:
    """One snapshot.

    Args:
        entry: Its line in ``index.json``.
    """

    def __init__(self, entry: dict[str, Any]) -> None:
        self.label: str = entry["label"]
        self.url: str = entry["url"]
        self._model: dict[str, int] = entry["model"]
        self._copies: int = entry["copies"]
        with gzip.open(_FOLDER / entry["file"]) as file:
            content = json.load(file)
        self.base: int = content["base_rounded"]
        self.peak: int = content["peak_rounded"]
        self.published = Played(content["end_blocks"], content["reserved"])
        self._raw: list[tuple[int, int]] = [tuple(event) for event in content["events"]]

    @cached_property
    def _events(self) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
        """Give every allocation a key of its own; return events, and what they free of the base."""
        alive: dict[int, int] = {}
        events, base = [], []
        for key, (id_, size) in enumerate(self._raw):
            if size > 0:
                alive[id_] = key
                events.append((key, size))
            elif id_ in alive:
                events.append((alive.pop(id_), size))
            else:
                base.append((key, -size))
                events.append((key, size))
        return events, base

    def peak_of_rounded(self) -> int:
        """Add up sizes rounded to 512 bytes; return the most."""
        total = most = self.base
        for _, size in self._raw:
            total += round_size(size) if size > 0 else -round_size(-size)
            most = max(most, total)
        return most

    def play(self) -> Played:
        """Play the events, each turn in place of the step before."""
        events, base = self._events
        allocator = CachingAllocator()
        for key, size in enumerate([*self._known_before(), self.unexplained_bytes()]):
            allocator.allocate(("before", key), size)
        keys: dict[int, Any] = {}
        for key, size in base:
            keys[key] = "base", key
            allocator.allocate(keys[key], size)
        for turn in range(TURNS):
            left: dict[int, int] = {}
            for key, size in events:
                if size > 0:
                    allocator.allocate((turn, key), size)
                    left[key] = size
                elif key in left:
                    allocator.free((turn, key))
                    del left[key]
                else:
                    allocator.free(keys[key])
            played = Played(allocator.allocated_bytes, allocator.reserved_bytes)
            self._prepare(allocator, turn, left, keys)
        return played

    def _prepare(
        self, allocator: CachingAllocator, turn: int, left: dict[int, int], keys: dict[int, Any]
    ) -> None:
        """Let the next turn free what this one left; free the rest, as between steps."""
        by_size: defaultdict[int, deque[int]] = defaultdict(deque)
        for key, size in left.items():
            by_size[size].append(key)
        for key, size in self._events[1]:
            if by_size[size]:
                keys[key] = turn, by_size[size].popleft()
            else:
                keys[key] = "again", turn, key
                allocator.allocate(keys[key], size)
        for rest in by_size.values():
            for key in rest:
                allocator.free((turn, key))

    def unexplained_bytes(self) -> int:
        """Return by how much what was there before exceeds what is known of it."""
        freed = [size for _, size in self._events[1]]
        return self.base - sum(map(round_size, self._known_before() + freed))

    def _known_before(self) -> list[int]:
        return [_WORKSPACE] * 2 + _parameters(**self._model) * self._copies


def _parameters(*, V: int, D: int, layers: int, width: int) -> list[int]:
    """List the bytes of each parameter of the model of ``programs.llama_like``."""
    block = [D * D] * 4 + [D * width] * 3 + [D] * 2
    return [_FLOAT32 * size for size in (V * D, *block * layers, D, D * V)]


REPLAYS = [Replay(entry) for entry in json.loads((_FOLDER / "index.json").read_text())]
