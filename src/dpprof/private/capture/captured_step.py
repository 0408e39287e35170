"""A whole private step that a GPU replays: Python runs once, not in each step.

A small model's step takes as long as Python takes to start its kernels. A CUDA graph starts all of
them at once. It has fixed sizes and addresses, and a Poisson batch has any size: so the graph runs
a part with a fixed number of samples, and is replayed as often as the batch needs. Copies of the
last part's first sample fill that part up, and count zero times. No sample is left out: that would
be another mechanism than the one that is accounted for. Further graphs add noise and step.

``CapturedStep`` says what is checked when.

Shape legend: B samples of a part, n samples of a batch.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from dpprof.private.capture.conditions import (
    Surroundings,
    look_around,
)
from dpprof.private.capture.step_graphs import StepGraphs, split
from dpprof.private.errors import UnsupportedError
from dpprof.private.noise.optimizer import NoisyOptimizer
from dpprof.private.norms import placement


class CapturedStep:
    """Runs private steps as CUDA graphs, and as an ordinary loop where that is not possible.

    Args:
        losses_of: Computes (B,) losses, one for each sample, from tensors like those of a batch.
        optimizer: With its clipping. Adam and AdamW get the option ``capturable``.
        part_size: Samples in a part, B: as many as fit into memory, or what divides the expected
            batch with little left.

    Raises:
        ValueError: ``part_size`` is less than 1.
        UnsupportedError: There are several ranks.

    A batch may also come in parts, each by ``add``, with ``finish`` at the end.

    Formal guarantees: those of the clipping and of ``NoisyOptimizer``.

    - A batch runs as an ordinary loop, with every check of these, if it is the first one, if it is
      empty, or if something is not as in the batch before (``capture.conditions`` has the list:
      what is trained, C, noise, an option of the optimizer, a module's mode or number, a hook and
      more).
    - The next batch is captured, with every check but those that need values.
    - These follow each replay, before noise: if a sample is not finite, or another output or
      gradient was summed than measured, or Python would have read another answer from the device
      (``capture.reads``), the sums are thrown away, and the batch runs as an ordinary loop, which
      excludes, counts or refuses.
    - Buffers and frozen parameters are verified in every step. Each replay reads the step's own
      seed, and the digest of its sums. The hooks of accountants run in each step, after noise and
      before the update; what they change counts from then on, as in the loop.
    - The step of Adam, AdamW and SGD is captured; any other optimizer's runs in Python.
    - Of ``losses_of`` its code is compared, and the variables that it names. Not seen is a change
      elsewhere: within lists and objects (a config), in what other functions name. The program that
      was captured goes on, on the tensors that it read then, and bounds its samples.

    Cost: one wait for the device in each batch; the memory of the graphs is taken until something
    changes.

    Example:
        >>> import torch
        >>> from dpprof.private import BookKeeping, CapturedStep, NoisyOptimizer
        >>> model = torch.nn.Linear(3, 1)
        >>> clipping = BookKeeping(model, max_grad_norm=1.0)
        >>> optimizer = NoisyOptimizer(
        ...     torch.optim.SGD(model.parameters(), lr=0.1),
        ...     clipping,
        ...     noise_multiplier=1.0,
        ...     expected_batch_size=5,
        ... )
        >>> step = CapturedStep(lambda x: model(x).square().sum(1), optimizer, part_size=2)
        >>> step(torch.ones(5, 3)).shape  # a batch of any size; its losses
        torch.Size([5])
        >>> step.is_captured  # there is no GPU
        False
    """

    def __init__(
        self, losses_of: Callable[..., Tensor], optimizer: NoisyOptimizer, part_size: int
    ) -> None:
        if part_size < 1:
            raise ValueError(f"part_size must be at least 1, and is {part_size}")
        ranks = optimizer.clipping.ranks
        if ranks.size > 1 or ranks.is_sharded:
            raise UnsupportedError("a captured step trains on one rank, and there are several")
        self.optimizer = optimizer
        self.part_size = part_size
        self.losses_of = losses_of
        self.captures = 0
        """How often graphs were made."""

        self._clipping = optimizer.clipping
        self._surroundings: Surroundings | None = None
        self._graphs: StepGraphs | None = None
        self._open: StepGraphs | None = None
        """The graphs that parts were added to, until the batch ends."""

    @property
    def is_captured(self) -> bool:
        """Whether a batch like the last one is replayed."""
        return self._graphs is not None

    def __call__(self, *batch: Tensor) -> Tensor:
        """Take one step on a batch of any size, none included.

        Args:
            batch: The arguments of ``losses_of``, samples first, on the device of the parameters.

        Returns:
            The losses of the samples before the step; (n,), detached.

        Raises:
            ValueError: The tensors have different numbers of samples, or are on another device.
            RuntimeError: As ``Clipping.backward`` and ``NoisyOptimizer.step``. Or the step waits
                for the device, and so cannot be captured.
        """
        self._verify(batch)
        if self.optimizer.is_within_a_batch:
            raise RuntimeError(
                "a batch is not finished, and this steps on whole batches; call step() of the "
                "optimizer first, or discard() the sums"
            )
        try:
            losses = self.add(batch) if len(batch[0]) else None
            return losses if losses is not None and self.finish() else self._run(batch)
        except BaseException:
            self.optimizer.discard()
            raise

    def add(self, batch: Sequence[Tensor], count: int | None = None) -> Tensor | None:
        """Clip a batch, or a part of one, by replaying graphs.

        Args:
            batch: The arguments of ``losses_of``, samples first.
            count: How many samples count, the first ones; by default all.

        Returns:
            Their losses; or None, where the batch, with the parts before, is to run as an ordinary
            loop.
        """
        if not self.is_as_before(batch):
            self.forget()
            return None
        repeated = self._clipping.repeated
        if self._open is None and repeated is not None and repeated.draw():
            return None
        with self._forgetting():
            self._open = self._open or self._graphs or self._make_graphs(batch)
            if self._open is None:
                return None
            return self._open.run_parts(batch, len(batch[0]) if count is None else count)

    def finish(self) -> bool:
        """Step on the parts that were added.

        Returns:
            Whether it did. If something of a sample was unusual, nothing changed, and the batch is
            to run as an ordinary loop.
        """
        assert self._open is not None
        with self._forgetting():
            graphs, self._open = self._open, None
            if not graphs.end_parts():
                self.forget()
                return False
            self._clipping.verify_released()
            graphs.prepare_update()
            if graphs is not self._graphs:  # before a hook may change what was captured
                self._graphs = graphs
                self.note(graphs.inputs)
            graphs.add_noise()
            if self.optimizer.step_hook is not None:
                self.optimizer.step_hook(self.optimizer)
            graphs.step()
        return True

    def is_as_before(self, batch: Sequence[Tensor]) -> bool:
        """Tell whether all that graphs rest on is as in the batch before."""
        is_verified = self._clipping.first_batch_verified or self.part_size == 1  # which mixes none
        present = look_around(self.optimizer, self.losses_of, batch)
        return is_verified and present.are_those_of(self._surroundings)

    def note(self, batch: Sequence[Tensor]) -> None:
        """Note that a batch ran as an ordinary loop, so that the next one like it is captured."""
        self._surroundings = look_around(self.optimizer, self.losses_of, batch)

    def forget(self) -> None:
        """Forget the graphs, and the parts that were added."""
        self._graphs = self._open = None

    def drop(self) -> None:
        """Forget the parts that were added."""
        if self._open is not None:
            self._open.replays = 0
            self._open = None

    def _verify(self, batch: Sequence[Tensor]) -> None:
        device = next(self._clipping.model.parameters()).device
        if not batch or len({len(tensor) for tensor in batch}) > 1:
            lengths = ", ".join(str(len(tensor)) for tensor in batch) or "none"
            raise ValueError(
                f"a batch has tensors with one row for each sample; their lengths are: {lengths}"
            )
        for tensor in batch:
            if tensor.device != device:
                raise ValueError(
                    f"the batch is on {tensor.device} and the model on {device}; move it there "
                    "first"
                )

    def _run(self, batch: Sequence[Tensor]) -> Tensor:
        """Run a batch as an ordinary loop."""
        losses: list[Tensor] = []
        with self._forgetting():
            done = 0
            for part in split(batch, self.part_size):
                if losses:
                    self.optimizer.zero_grad()
                done += len(part[0])
                self.optimizer.signal_skip_step(done < len(batch[0]))
                losses_B = self.losses_of(*part) if len(part[0]) else torch.zeros(0)
                losses.append(losses_B.detach().to(part[0].device))
                self._clipping.backward(losses_B)
                del losses_B  # and its graph
                self.optimizer.step()
            self.optimizer.zero_grad()
        if self._graphs is None:  # else it stays as it was captured
            self.note(batch)
        return torch.cat(losses)

    @contextmanager
    def _forgetting(self) -> Iterator[None]:
        """Forget graphs and sums if something raises inside the context."""
        try:
            yield
        except BaseException:
            self.forget()
            self.optimizer.clear_sums()
            raise

    def _make_graphs(self, batch: Sequence[Tensor]) -> "StepGraphs | None":
        """Return graphs, none of which is captured yet; None where the loop has to be ordinary."""
        parameters = list(self._clipping.model.parameters())
        device = parameters[0].device
        is_on_it = all(parameter.device == device for parameter in parameters)
        if not (is_on_it and placement.is_cuda(parameters[0])):
            return None
        self.captures += 1
        return StepGraphs(device, self.losses_of, self.optimizer, batch, self.part_size)
