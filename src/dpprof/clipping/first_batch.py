"""Verifies on the first batch that no sample's loss depends on another sample.

Clipping sees layers, and not the code between them. Code that mixes samples, or that puts another
axis of the same length first, makes norms those of no sample. One backward of one sample's loss
shows it: the gradient of a trained layer's output must be zero outside of that sample's entries,
exactly, since zeros stay zeros on their way.

What it proves: on this batch, the loss of one sample does not depend on what trained layers
computed for the others, by any path that autograd differentiates. Where that sample's own gradient
is zero, as below a matrix that starts at zero, nothing is proved, and the next batches are looked
at too, ``TRIES`` at most. It does not see values that reach a loss without a gradient (a count of
the batch's tokens, a detached mean), mixing before the first trained layer, layers that do not run,
other samples of the batch, other data or later steps. ``Clipping.check`` sees some of these.

Shape legend: B samples, T tokens, p width of an output.
"""

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from dpprof.clipping.contributions import (
    ChunkedProduct,
    Contribution,
    Convolution,
    Lookup,
    Product,
    SampleGradients,
    Scale,
    Shift,
)
from dpprof.clipping.layers import Contributions
from dpprof.clipping.layout import Layout
from dpprof.clipping.ranks import Ranks
from dpprof.clipping.sample_norms import BatchAxisError
from dpprof.spec.registry import UnsupportedError

Handler = Callable[[nn.Module, Contributions], None]
"""Handles the contributions of a layer during one backward pass."""

FIRST_BATCH = ("verified", "trusted")
"""How the first batch is treated."""

TRIES = 10
"""The most batches to look at where a layer's gradients are all zero."""


class FirstBatches:
    """Verifies batches until each layer that runs was seen.

    Args:
        what: One of ``FIRST_BATCH``.
        loss_scale: What losses are multiplied with for backward.
        ranks: Under ``fully_shard`` all run backward together, and share their findings.
        name_of: Names a layer.

    Raises:
        ValueError: ``what`` is another word.
    """

    def __init__(
        self, what: str, loss_scale: float, ranks: Ranks, name_of: Callable[[nn.Module], str]
    ) -> None:
        if what not in FIRST_BATCH:
            raise ValueError(f"first_batch must be one of {FIRST_BATCH}, and is {what!r}")
        self.are_verified = what == "trusted"
        self._ranks, self._name_of, self._loss_scale = ranks, name_of, loss_scale
        self._looked_at = 0
        self._ways: set[str] = set()
        self._verified_ways: set[str] | None = None
        self._are_other = False
        self._asks = False
        self.begin()

    def begin(self) -> None:
        """Remember what is verified, before a batch."""
        self._before = self.are_verified, self._looked_at, self._verified_ways

    def undo(self) -> None:
        """Forget what was verified on the last batch, because it was refused."""
        self.are_verified, self._looked_at, self._verified_ways = self._before

    def expect(self, ways: set[str]) -> None:
        """Verify again where the coming batch is computed in a way that was not verified.

        Args:
            ways: How values enter for all samples (``broadcasts``), which rows samples have
                (``layout``), and settings (``batch_axis``).
        """
        self._ways = ways
        self._are_other = self._verified_ways is not None and not ways <= self._verified_ways

    def verify(
        self,
        losses: Tensor,
        handling: Callable[[Handler], AbstractContextManager[None]],
        parameters: Iterable[nn.Parameter],
        layout: Layout,
    ) -> None:
        """Verify a batch, unless that is done; one with fewer than two samples shows nothing.

        Args:
            losses: (B,), whose graph stays.
            handling: Lets a function look at every layer's contributions.
            parameters: Say on which devices random numbers are drawn.
            layout: Notes layers of which it proves nothing.

        Raises:
            UnsupportedError: Samples are mixed.
        """
        if not losses.requires_grad or isinstance(losses, FakeTensor):
            return
        if self.are_verified and self._is_due_again():
            self.are_verified, self._looked_at = False, 0
        if self.are_verified:
            return
        batch, ranks = _Batch(losses, self._loss_scale, self._name_of), self._ranks
        if batch.sample is None and not ranks.is_sharded:
            return
        with _random_state_kept(parameters), handling(batch.look):
            torch.autograd.backward(losses, batch.weights, retain_graph=True)
        problem = layout.problem or batch.problem
        is_wrong, has_looked, is_incomplete, has_ways = ranks.any(
            problem is not None,
            batch.sample is not None,
            not batch.is_complete,
            bool(self._ways),
        )
        if is_wrong:
            raise problem or UnsupportedError("another rank found that samples are mixed")
        self._asks |= has_ways
        if not has_looked:  # no rank has two samples
            return
        self._looked_at += 1
        self.are_verified = not is_incomplete or self._looked_at == TRIES
        if self.are_verified:
            self._verified_ways = self._ways | (self._verified_ways or set())

    def _is_due_again(self) -> bool:
        """Tell whether a batch is computed in another way than those that were verified.

        Ranks that run backward together ask each other where one of them found such ways before;
        elsewhere they are refused (``refuse_late_ways``), so that other models need not ask.
        """
        if self._ranks.is_sharded and not self._asks:
            return False
        (is_due,) = self._ranks.any(self._are_other)
        return is_due

    @property
    def has_late_ways(self) -> bool:
        """Whether this batch has ways that ranks with shards did not ask each other about."""
        return self._are_other and not self._asks and self._ranks.is_sharded

    def refuse_late_ways(self) -> None:
        """Refuse a batch that is computed in such ways.

        Raises:
            UnsupportedError: It is.
        """
        if self.has_late_ways:
            raise UnsupportedError(
                "code outside of layers lets values enter for all samples, or joins samples and "
                f"tokens ({min(self._ways)}), as no earlier batch did, so ranks did not verify it; "
                "begin with a batch of two samples or more on a rank that runs all of the model"
            )


class _Batch:
    """Looks at one backward of one sample's loss."""

    def __init__(
        self, losses: Tensor, loss_scale: float, name_of: Callable[[nn.Module], str]
    ) -> None:
        self._name_of = name_of
        self._samples = len(losses)
        finite = losses.detach().isfinite().nonzero().flatten().tolist()
        self.sample = finite[len(finite) // 2] if finite and self._samples > 1 else None
        """Whose loss is differentiated: the middle one of those that are finite; None for none."""

        self.weights = torch.zeros_like(losses)
        """The gradient with which the losses are differentiated; (B,)."""

        if self.sample is not None:
            self.weights[self.sample] = loss_scale
        self.problem: UnsupportedError | None = None
        """What is wrong with the first layer, in the order of backward, where something is."""

        self.is_complete = self.sample is not None
        """Whether the sample has a gradient in each layer that ran."""

    def look(self, layer: nn.Module, contributions: Contributions) -> None:
        """Look at the gradients of a layer's outputs."""
        for _, contribution in contributions:
            if self.problem is None:
                self.problem = self._find_problem(layer, _gradients_of(contribution))

    def _find_problem(self, layer: nn.Module, gradients: Tensor) -> UnsupportedError | None:
        if self._samples and len(gradients) != self._samples:  # without losses nothing counts
            return BatchAxisError.of(self._name_of(layer), len(gradients), self._samples)
        sample = self.sample
        if sample is None:
            return None
        nonzero = set(_find_nonzero(gradients, 0))
        self.is_complete &= sample in nonzero
        if not nonzero - {sample}:
            return None
        problem = f"{self._name_of(layer)} saw another axis than samples first, of the same length"
        if not _lies_on_another_axis(gradients, sample):
            problem = (
                f"the loss of one sample depends on what {self._name_of(layer)} computed for "
                "another: code after it mixes samples, or another axis comes first"
            )
        return UnsupportedError(
            f"{problem}; keep samples apart, and on the first axis everywhere, or on the second "
            "where batch_second says so (first_batch='trusted' skips this check, and clips "
            "wrongly where it would fail)"
        )


def _gradients_of(contribution: Contribution) -> Tensor:
    """Return output gradients, or the parameter's; samples first."""
    match contribution:
        case SampleGradients(gradients):
            return gradients.reshape(len(gradients), -1)
        case ChunkedProduct():
            return contribution.largest()
        case Convolution():
            return contribution.output_gradients
        case Shift(g) | Product(_, g) | Lookup(_, g) | Scale(_, _, _, g):
            return g


def _find_nonzero(gradients: Tensor, axis: int) -> list[int]:
    """List the places on an axis where something is not zero; NaN counts as zero."""
    if not gradients.numel():  # of a layer without width
        return []
    others = [at for at in range(gradients.dim()) if at != axis]
    largest = torch.linalg.vector_norm(gradients, torch.inf, dim=others)
    places: list[int] = (largest > 0).nonzero().flatten().tolist()
    return places


def _lies_on_another_axis(gradients: Tensor, sample: int) -> bool:
    """Tell whether a sample's entries of (B, T, p) lie on the first or last axis that T has."""
    B, T = len(gradients), gradients.shape[1:2].numel()
    if T % B:
        return False
    shapes = {1: (B, B, T // B, -1), 2: (B, T // B, B, -1)}
    return any(
        _find_nonzero(gradients.reshape(shape), axis) == [sample] for axis, shape in shapes.items()
    )


def _random_state_kept(parameters: Iterable[nn.Parameter]) -> AbstractContextManager[None]:
    """Restore the state of PyTorch's generators at the end of the context."""
    devices = {p.device for p in parameters if p.device.type != "cpu"}
    kind = next((device.type for device in devices), "cuda")
    indices = sorted({device.index for device in devices if device.type == kind})
    return torch.random.fork_rng(devices=indices, device_type=kind)
