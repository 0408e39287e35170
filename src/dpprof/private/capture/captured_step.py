"""A whole private step that a GPU replays: Python runs once, not in each step.

A small model's step takes as long as Python takes to start its kernels. A CUDA graph starts all of
them at once. It has fixed sizes and addresses, and a Poisson batch has any size: so the graph runs
a part with a fixed number of samples, and is replayed as often as the batch needs. Copies of the
last part's first sample fill that part up, and count zero times. No sample is left out: that would
be another mechanism than the one that is accounted for. Further graphs add noise and step.

``CapturedStep`` says what is checked when.

Shape legend: B samples of a part, n samples of a batch.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dpprof.private.capture.replays import Replays
from dpprof.private.capture.step_graphs import split
from dpprof.private.noise.optimizer import NoisyOptimizer


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
        self.optimizer = optimizer
        self._replays = Replays(optimizer, part_size, losses_of)

    @property
    def is_captured(self) -> bool:
        """Whether a batch like the last one is replayed."""
        return self._replays.is_captured

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
        replays = self._replays
        try:
            losses = replays.add(batch) if len(batch[0]) else None
            if losses is not None and replays.finish():
                return losses
            losses = self._run(batch)
            replays.note(batch)
        except BaseException:
            replays.forget()
            self.optimizer.discard()
            raise
        return losses

    def _verify(self, batch: Sequence[Tensor]) -> None:
        device = next(self.optimizer.clipping.model.parameters()).device
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
        clipping = self.optimizer.clipping
        losses: list[Tensor] = []
        norms: list[Tensor] = []
        done = 0
        for part in split(batch, self._replays.part_size):
            if losses:
                self.optimizer.zero_grad()
            done += len(part[0])
            self.optimizer.signal_skip_step(done < len(batch[0]))
            losses_B = self._replays.losses_of(*part) if len(part[0]) else torch.zeros(0)
            losses.append(losses_B.detach().to(part[0].device))
            clipping.backward(losses_B)
            del losses_B  # and its graph
            norms += [] if clipping.sample_norms is None else [clipping.sample_norms]
            self.optimizer.step()
        self.optimizer.zero_grad()
        clipping.sample_norms = torch.cat(norms) if norms else None
        return torch.cat(losses)
