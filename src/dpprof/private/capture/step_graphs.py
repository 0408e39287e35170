"""The CUDA graphs of a private step: of a part of a batch, of noise, and of the update.

Shape legend: B samples of a part.
"""

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dpprof.private.capture.conditions import (
    Surroundings,
    describe_options,
    may_capture_step,
    takes_rate_on_device,
)
from dpprof.private.capture.cuda_graphs import CudaGraphs, holding_inputs, make_capturable
from dpprof.private.capture.reads import Reads, refusing_draws_on_host
from dpprof.private.contributions.deferral import Deferral
from dpprof.private.noise.noise_keys import takes_kernel
from dpprof.private.noise.optimizer import NoisyOptimizer
from dpprof.private.samples.random_state import random_state_kept
from dpprof.private.substitutes import substitute


class _Part(NamedTuple):
    replay: Callable[[], None]
    losses_B: Tensor
    norms_B: Tensor


class StepGraphs:
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
        self.surroundings: Surroundings | None = None  # under which this was captured
        self._settings = optimizer.settings
        self._sums: list[Tensor] | None = None
        self.replays = 0  # of this batch, so far
        self._parts: dict[bool, _Part] = {}
        """The graph of the first part of a batch (True), and that of each other part (False), which
        adds its sums to those of the parts before."""

        self._noise: Callable[[], None] | None = None
        self._step: Callable[[], None] | None = None  # None where the step runs in Python
        self._options: list[Any] = []  # the options of the optimizer when its step was captured
        self._held: list[Any] = []  # what graphs read: unless kept, it could become another's

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
                self._fill(part, size)  # the function may change its inputs
            self._parts[is_first].replay()
            self.replays += 1
            losses.append(self._parts[is_first].losses_B[:size].clone())
            norms.append(self._parts[is_first].norms_B[:size].clone())
        self._clipping.sample_norms = torch.cat(norms)
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
        optimizer.keys.prepare(self._sums if optimizer.noise_multiplier else [])
        self._noise = optimizer.release
        is_on_device = optimizer.keys.generator is not None or all(map(takes_kernel, self._sums))
        if is_on_device and not optimizer.secure_mode and optimizer.buffers is None:
            self._noise = self._capture(optimizer.release)
        self._options = describe_options(self._optimizer)
        if may_capture_step(self._optimizer):
            make_capturable(self._optimizer.original_optimizer)
            self._options = describe_options(self._optimizer)
            with self._rates_on_device():
                step = partial(optimizer.step_with_noise_in, self._sums)
                self._step = self._capture(step)

    def add_noise(self) -> None:
        """Add noise to the sums and average them.

        ``RuntimeError``: a given generator would repeat the noise of an earlier step; or
        the graphs clip and draw noise by other settings than the optimizer's.
        """
        assert self._noise is not None
        if self._optimizer.settings != self._settings:
            raise RuntimeError("a setting changed since the graphs were captured; use the loop")
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
            # Copies, which others may keep: graphs write their own memory again.
            gradients = [summed.clone() for summed in self._sums or ()]
            self._optimizer.step_with_noise_in(gradients)
            self._optimizer.original_optimizer.zero_grad()
        else:
            for group, rate in zip(self._optimizer.param_groups, self._rates, strict=True):
                if rate is not None:
                    rate.fill_(group["lr"])
            self._step()
        self._optimizer.end_step()

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
            if losses_B.shape != self._weights_B.shape:
                raise ValueError(
                    f"there must be one loss for each of {len(self._weights_B)} samples, and "
                    f"losses have shape {tuple(losses_B.shape)}"
                )
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
                with (
                    holding_inputs() as self._held,
                    refusing_draws_on_host(others, is_cuda=self._weights_B.is_cuda),
                    buffers_kept(self._clipping.model),
                ):
                    self._graphs.warm_up(run, self._optimizer.clear_sums)
                self._is_unusual.zero_()
            else:
                self._give_sums()
            replay, output = self._graphs.capture(run)
            self._sums = list(self._clipping.sums.total.values())
        self._clipping.verify_released()
        return _Part(replay, *output)

    def _give_sums(self) -> None:
        """Give the optimizer the sums of the parts before, as if it had accumulated them."""
        assert self._sums is not None
        self._optimizer.clear_sums()
        self._clipping.sums.total |= zip(self._optimizer.params, self._sums, strict=True)
        self._clipping.sums.bound = self._settings["max_grad_norm"]

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


@contextmanager
def buffers_kept(model: nn.Module) -> Iterator[None]:
    """Restore the values of buffers at the end: runs that warm up write public ones too."""
    before = [(buffer, buffer.clone()) for buffer in model.buffers()]
    yield
    for buffer, values in before:
        if not torch.equal(buffer, values):
            buffer.copy_(values)


def split(batch: Sequence[Tensor], size: int) -> Iterator[Sequence[Tensor]]:
    """Split a batch into parts; one without samples is one part."""
    yield from zip(*(torch.split(tensor, size) for tensor in batch), strict=True)
