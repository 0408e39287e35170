"""A whole private step that a GPU replays: Python runs once, not in each step.

A small model's step takes as long as Python takes to start its kernels. A CUDA graph starts all of
them at once. It has fixed sizes and addresses, and a Poisson batch has any size: so the graph runs
a part with a fixed number of samples, and is replayed as often as the batch needs. Copies of the
last part's first sample fill that part up, and count zero times. No sample is left out: that would
be another mechanism than the one that is accounted for. Further graphs add noise and step.

``CapturedStep`` says what is checked when.

Shape legend: B samples of a part, n samples of a batch.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dpprof.private.capture.conditions import (
    Surroundings,
    describe_options,
    look_around,
    may_capture_step,
    takes_rate_on_device,
)
from dpprof.private.capture.cuda_graphs import CudaGraphs, holding_inputs, make_capturable
from dpprof.private.capture.reads import Reads
from dpprof.private.contributions.deferral import Deferral
from dpprof.private.errors import UnsupportedError
from dpprof.private.noise.noise_keys import takes_kernel
from dpprof.private.noise.optimizer import NoisyOptimizer
from dpprof.private.norms import placement
from dpprof.private.samples.random_state import OtherGenerators, random_state_kept
from dpprof.private.substitutes import substitute


class _Part(NamedTuple):
    """The graph of a part."""

    replay: Callable[[], None]
    losses_B: Tensor
    norms_B: Tensor


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
        self._graphs: _Graphs | None = None
        self._open: _Graphs | None = None
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

    def _make_graphs(self, batch: Sequence[Tensor]) -> "_Graphs | None":
        """Return graphs, none of which is captured yet; None where the loop has to be ordinary."""
        parameters = list(self._clipping.model.parameters())
        device = parameters[0].device
        is_on_it = all(parameter.device == device for parameter in parameters)
        if not (is_on_it and placement.is_cuda(parameters[0])):
            return None
        self.captures += 1
        return _Graphs(device, self.losses_of, self.optimizer, batch, self.part_size)


class _Graphs:
    """The graphs of parts and of the update, and the tensors that they read and write."""

    def __init__(
        self,
        device: torch.device,
        losses_of: Callable[..., Tensor],
        optimizer: NoisyOptimizer,
        batch: Sequence[Tensor],
        part_size: int,
    ) -> None:
        self._losses_of, self._optimizer = losses_of, optimizer
        self._clipping = optimizer.clipping
        self._graphs = CudaGraphs(device, self._list_generators)
        self.inputs = [
            tensor.new_empty(part_size, *tensor.shape[1:], device=device) for tensor in batch
        ]
        self._reads = Reads(device)
        self._weights_B = torch.zeros(part_size, dtype=torch.float32, device=device)
        self._is_unusual = torch.zeros((), dtype=torch.bool, device=device)
        self._rates = [
            torch.tensor(group["lr"], dtype=torch.float32, device=device)
            if takes_rate_on_device(group)
            else None
            for group in optimizer.param_groups
        ]
        self._sums: list[Tensor] | None = None
        self.replays = 0
        """Of this batch, so far."""

        self._parts: dict[bool, _Part] = {}
        """The graph of the first part of a batch (True), and that of each other part (False), which
        adds its sums to those of the parts before."""

        self._noise: Callable[[], None] | None = None
        self._step: Callable[[], None] | None = None
        """The graph of the optimizer's step; None where that runs in Python."""

        self._options: list[Any] = []
        """The options of the optimizer when its step was captured."""

        self._held: list[Any] = []
        """The memory that graphs read: once nothing else keeps it, it could become another's."""

    def _list_generators(self) -> list[torch.Generator]:
        generator = self._optimizer.keys.generator
        return [*self._clipping.generators, *([] if generator is None else [generator])]

    def run_parts(self, batch: Sequence[Tensor], count: int) -> Tensor:
        """Add the clipped gradients of a batch's first ``count`` samples; return their losses."""
        losses: list[Tensor] = []
        norms: list[Tensor] = []
        if not self.replays:
            self._is_unusual.zero_()
        for part in split(batch, len(self._weights_B)):
            size = min(count, len(part[0]))
            count -= size
            self._fill(part, size)
            is_first = not self.replays
            if is_first not in self._parts:
                self._parts[is_first] = self._capture_part(is_first)
            self._parts[is_first].replay()
            self.replays += 1
            losses.append(self._parts[is_first].losses_B[:size].clone())
            norms.append(self._parts[is_first].norms_B[:size].clone())
        self._clipping.sample_norms = norms[-1]
        return torch.cat(losses)

    def end_parts(self) -> bool:
        """Count the parts, unless something was unusual: then the sums must be thrown away."""
        replays, self.replays = self.replays, 0
        if self._is_unusual.item():  # the one wait for the device
            return False
        self._clipping.nonfinite_samples = 0
        self._clipping.batches += replays
        return True

    def prepare_update(self) -> None:
        """Capture noise, and the optimizer's step where that is possible, unless that is done."""
        if self._noise is not None:
            return
        assert self._sums is not None
        optimizer = self._optimizer
        self._noise = optimizer.release
        is_on_device = optimizer.keys.generator is not None or all(map(takes_kernel, self._sums))
        if is_on_device and not optimizer.secure_mode:
            self._noise = self._capture(optimizer.release)
        self._options = describe_options(self._optimizer)
        if may_capture_step(self._optimizer):
            make_capturable(self._optimizer.original_optimizer)
            self._options = describe_options(self._optimizer)
            with self._rates_on_device():
                self._step = self._capture(self._step_on_sums)

    def add_noise(self) -> None:
        """Add noise to the sums and average them.

        Raises:
            RuntimeError: A given generator would repeat the noise of an earlier step.
        """
        assert self._noise is not None
        self._give_sums()
        self._optimizer.begin_noise()
        before = self._read_given()
        self._noise()
        self._optimizer.clear_sums()  # what it did in Python: the sums are here
        if before and self._read_given() == before:
            raise RuntimeError("the graph drew no new noise, so nothing was applied; use the loop")

    def _read_given(self) -> bytes:
        """Return the state of the generator that draws the noise, if one was given."""
        generator = self._optimizer.keys.generator
        if generator is None or self._optimizer.noise_multiplier == 0:
            return b""
        return generator.get_state().numpy().tobytes()

    def step(self) -> None:
        """Let the optimizer step on the sums, which have noise."""
        if self._step is None or describe_options(self._optimizer) != self._options:
            self._step_on_sums()
            self._optimizer.original_optimizer.zero_grad()
        else:
            for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
                if rate is not None:
                    rate.fill_(group["lr"])
            self._step()
        self._optimizer.end_step()

    def _step_on_sums(self) -> None:
        assert self._sums is not None
        self._optimizer.step_with_noise_in(self._sums)

    @contextmanager
    def _rates_on_device(self) -> Iterator[None]:
        with ExitStack() as rates:
            for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
                if rate is not None:
                    rates.callback(operator.setitem, group, "lr", group["lr"])
                    group["lr"] = rate.fill_(group["lr"])
            yield

    def _capture(self, function: Callable[[], object]) -> Callable[[], None]:
        """Capture a function that an optimizer runs on the sums of all parts."""
        with self._keeping_count():
            self._give_sums()
            return self._graphs.capture(function)[0]

    def _fill(self, part: Sequence[Tensor], count: int) -> None:
        """Copy a part, and fill it up with copies of its first sample, which do not count."""
        size = len(part[0])
        for static, tensor in zip(self.inputs, part, strict=True):
            static[:size].copy_(tensor.detach(), non_blocking=True)
            static[size:].copy_(static[:1].expand(len(static) - size, *tensor.shape[1:]))
        self._weights_B[:count].fill_(1)
        self._weights_B[count:].zero_()

    def _capture_part(self, is_first: bool) -> _Part:
        deferral = Deferral(self._weights_B)

        def run() -> tuple[Tensor, Tensor]:
            with self._reads.kept():
                losses_B = self._losses_of(*self.inputs)
            self._clipping.backward(losses_B)
            self._is_unusual.logical_or_(deferral.is_unusual()).logical_or_(self._reads.differ())
            self._optimizer.close_part()
            norms_B = self._clipping.sample_norms
            assert norms_B is not None
            return losses_B.detach(), norms_B

        with (
            self._keeping_count(),
            substitute(self._clipping, "deferral", deferral),
            self._clipping.first_batch_trusted(),  # it was verified, or has one sample
            random_state_kept() as others,
        ):
            if is_first:
                with holding_inputs() as self._held, self._drawing_on_device(others):
                    self._graphs.warm_up(run, self._optimizer.clear_sums)
                self._is_unusual.zero_()
            else:
                self._give_sums()
            replay, output = self._graphs.capture(run)
            self._sums = list(self._clipping.sums.total.values())
        self._clipping.verify_released()
        return _Part(replay, *output)

    @contextmanager
    def _drawing_on_device(self, others: OtherGenerators) -> Iterator[None]:
        """Refuse what draws numbers on the host: each replay would repeat them (RuntimeError)."""
        before = others.read(), self._read_host()
        yield
        if (others.read(), self._read_host()) != before:
            raise RuntimeError(
                "the step draws random numbers on the host, and a graph would repeat them; draw "
                "them on the device, or use the ordinary loop"
            )

    def _read_host(self) -> bytes:
        is_cuda = self._weights_B.is_cuda
        return torch.get_rng_state().numpy().tobytes() if is_cuda else b""

    def _give_sums(self) -> None:
        """Give the optimizer the sums of the parts before, as if it had accumulated them."""
        assert self._sums is not None
        self._optimizer.clear_sums()
        self._clipping.sums.total |= zip(self._optimizer.params, self._sums, strict=True)

    @contextmanager
    def _keeping_count(self) -> Iterator[None]:
        """Undo at the end what a capture counts in Python: only replays count."""
        clipping, optimizer = self._clipping, self._optimizer
        batches, steps = clipping.batches, optimizer.steps
        try:
            yield
        finally:
            clipping.batches, optimizer.steps = batches, steps
            optimizer.clear_sums()


def split(batch: Sequence[Tensor], size: int) -> Iterator[Sequence[Tensor]]:
    """Split a batch into parts; one without samples is one part."""
    yield from zip(*(torch.split(tensor, size) for tensor in batch), strict=True)
