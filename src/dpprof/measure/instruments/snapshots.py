"""Counters at the named moments of a run."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from dpprof.experiments.records.step_costs import Snapshot
from dpprof.experiments.records.terms import Phase
from dpprof.measure.devices.device import Counters
from dpprof.subjects.methods.training_step import Enter
from dpprof.subjects.setup import TensorHolders, Training

_AFTER: dict[Phase, str] = {
    "forward": "after_forward",
    "backward": "after_backward",
    "second_backward": "after_second_backward",
    "step": "after_step",
}


class Snapshots:
    """Collects snapshots at named moments.

    Args:
        counters: Reads the allocator at a moment of this name.
        components: Returns bytes by component; None to leave them out.
        rss: Returns resident memory; None to leave it out.
    """

    def __init__(
        self,
        counters: Callable[[str], Counters],
        components: Callable[[TensorHolders], dict[str, int]] | None = None,
        rss: Callable[[], int] | None = None,
    ) -> None:
        self._counters = counters
        self._components = components
        self._rss = rss
        self._start = time.perf_counter()
        self.taken: dict[str, Snapshot] = {}

    def take(self, name: str, holders: TensorHolders) -> None:
        """Record a moment under a name, replacing an earlier one of this name."""
        counters = self._counters(name)
        self.taken[name] = Snapshot(
            name=name,
            allocated_bytes=counters.allocated_bytes,
            reserved_bytes=counters.reserved_bytes,
            rss_bytes=self._rss and self._rss(),
            elapsed_s=time.perf_counter() - self._start,
            components=self._components and self._components(holders),
        )

    def watch_step(self, training: Training, enter: Enter) -> None:
        """Run one step with a snapshot at the end of the phases that have one."""

        @contextmanager
        def around(phase: Phase) -> Iterator[None]:
            yield
            if phase in _AFTER:
                self.take(_AFTER[phase], training.holders)

        self.take("before_forward", training.holders)
        training.run_phases(enter, around)
