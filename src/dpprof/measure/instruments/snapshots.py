"""Counters at the named moments of a run."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from dpprof.experiments.records.step_costs import Snapshot
from dpprof.experiments.records.terms import Phase
from dpprof.measure.devices.device import Counters
from dpprof.subjects.methods.training_step import Enter
from dpprof.subjects.setup import TensorHolders, Training

_WATCHED: tuple[Phase, ...] = ("forward", "backward", "second_backward", "step")


@dataclass
class Snapshots:
    """Collects snapshots at named moments."""

    counters: Callable[[str], Counters]  # reads the allocator at a moment of this name
    components: Callable[[TensorHolders], dict[str, int]] | None = None
    """Returns bytes by component; None to leave them out."""

    rss: Callable[[], int] | None = None  # returns resident memory; None to leave it out
    start: float = field(default_factory=time.perf_counter)
    taken: dict[str, Snapshot] = field(default_factory=dict)

    def take(self, name: str, holders: TensorHolders) -> None:
        """Record a moment under a name, replacing an earlier one of this name."""
        counters = self.counters(name)
        self.taken[name] = Snapshot(
            name=name,
            allocated_bytes=counters.allocated_bytes,
            reserved_bytes=counters.reserved_bytes,
            rss_bytes=self.rss and self.rss(),
            elapsed_s=time.perf_counter() - self.start,
            components=self.components and self.components(holders),
        )

    def watch_step(self, training: Training, enter: Enter) -> None:
        """Run one step with a snapshot at the end of the phases that have one."""

        @contextmanager
        def around(phase: Phase) -> Iterator[None]:
            yield
            if phase in _WATCHED:
                self.take(f"after_{phase}", training.holders)

        self.take("before_forward", training.holders)
        training.run_phases(enter, around)
