"""Decides whether a batch is replayed: only if all is as it was when its graphs were captured."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from dpprof.private.capture.conditions import Surroundings, look_around
from dpprof.private.capture.step_graphs import StepGraphs
from dpprof.private.contributions.sums import own_part
from dpprof.private.errors import UnsupportedError
from dpprof.private.noise.optimizer import NoisyOptimizer
from dpprof.private.norms import placement
from dpprof.private.samples.random_state import random_state_kept


class Replays:
    """Clips batches by replaying graphs, and steps on them.

    Graphs have the surroundings under which they were captured, and are replayed under no others:
    not for a part, and not for a step. Who calls this runs every other batch as an ordinary loop. A
    graph has ``part_size`` samples (``ValueError`` below 1), and ``losses_of`` computes (B,) losses
    from tensors like those of a batch. ``UnsupportedError``: there are several ranks.
    """

    def __init__(
        self, optimizer: NoisyOptimizer, part_size: int, losses_of: Callable[..., Tensor]
    ) -> None:
        if part_size < 1:
            raise ValueError(f"part_size must be at least 1, and is {part_size}")
        ranks = optimizer.clipping.ranks
        if ranks.size > 1 or ranks.is_sharded:
            raise UnsupportedError("a captured step trains on one rank, and there are several")
        self.part_size, self.losses_of = part_size, losses_of
        self.captures = 0  # how often graphs were made
        self._optimizer, self._clipping = optimizer, optimizer.clipping
        self._noted: Surroundings | None = None  # of the last ordinary batch
        self._graphs: StepGraphs | None = None
        self._open: StepGraphs | None = None  # what parts were added to, until the batch ends

    @property
    def is_captured(self) -> bool:
        """Whether a batch like the last one is replayed."""
        return self._graphs is not None

    def would_replay(self, batch: Sequence[Tensor]) -> bool:
        """Tell whether a batch like this one would be replayed."""
        present = self._look(batch)
        if self._graphs is not None and present.are_those_of(self._graphs.surroundings):
            return True
        is_verified = self._clipping.first_batch_verified or self.part_size == 1  # which mixes none
        return is_verified and present.are_those_of(self._noted)

    def add(self, batch: Sequence[Tensor], count: int | None = None) -> Tensor | None:
        """Clip ``count`` samples by replaying graphs; None where an ordinary loop is to do it."""
        with self._forgetting():
            graphs = self._open or self._graphs
            if graphs is not None and not self._look(batch).are_those_of(graphs.surroundings):
                self.forget()
                if graphs.replays:
                    return None
                graphs = None
            if graphs is None and self.would_replay(batch):
                graphs = self._make_graphs(batch)
            self._open = graphs
            if graphs is None:
                return None
            return graphs.run_parts(batch, len(batch[0]) if count is None else count)

    def finish(self) -> bool:
        """Step on the parts that were added; or tell that an ordinary loop is to run the batch."""
        assert self._open is not None
        with self._forgetting():
            graphs, self._open = self._open, None
            is_as_before = self._look(graphs.inputs).are_those_of(graphs.surroundings)
            if not (is_as_before and graphs.end_parts()):
                self.forget()
                return False
            self._clipping.verify_released()
            graphs.prepare_update()
            if graphs is not self._graphs:  # before a hook may change what was captured
                self._graphs = graphs
                graphs.surroundings = self._look(graphs.inputs)
            graphs.add_noise()
            if self._optimizer.step_hook is not None:
                self._optimizer.step_hook(self._optimizer)
            graphs.step()
        return True

    def note(self, batch: Sequence[Tensor]) -> None:
        """Note that a batch ran as an ordinary loop, so that the next one like it is captured."""
        self._noted = self._look(batch)

    def rehearse(self, compute: Callable[[], Tensor], batch: Sequence[Tensor]) -> None:
        """Clip a batch, of these tensors, with all checks, throw its sums away, and note it."""
        clipping, optimizer = self._clipping, self._optimizer
        counts = clipping.batches, clipping.nonfinite_samples_total
        try:
            with random_state_kept():
                clipping.backward(compute())
            optimizer.close_part()
            totals = [own_part(total) for total in clipping.sums.total.values()]
            optimizer.keys.prepare(totals if optimizer.noise_multiplier else [])
        finally:
            clipping.batches, clipping.nonfinite_samples_total = counts
            optimizer.clear_sums()
        self.note(batch)

    def forget(self) -> None:
        """Forget the graphs, and the parts that were added."""
        self._graphs = self._open = None

    def forget_all(self) -> None:
        """Forget the last ordinary batch too."""
        self.forget()
        self._noted = None

    def drop(self) -> None:
        """Forget the parts that were added."""
        if self._open is not None:
            self._open.replays = 0
            self._open = None

    def _look(self, batch: Sequence[Tensor]) -> Surroundings:
        return look_around(self._optimizer, self.losses_of, batch)

    @contextmanager
    def _forgetting(self) -> Iterator[None]:
        """Forget graphs and sums if something raises inside the context."""
        try:
            yield
        except BaseException:
            self.forget()
            self._optimizer.clear_sums()
            raise

    def _make_graphs(self, batch: Sequence[Tensor]) -> StepGraphs | None:
        """Return graphs, none of which is captured yet; None where the loop has to be ordinary."""
        parameters = list(self._clipping.model.parameters())
        device = parameters[0].device
        is_on_it = all(parameter.device == device for parameter in parameters)
        if not (is_on_it and placement.is_cuda(parameters[0])):
            return None
        self.captures += 1
        graphs = StepGraphs(device, self.losses_of, self._optimizer, batch, self.part_size)
        graphs.surroundings = self._look(batch)
        return graphs
