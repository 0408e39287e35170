"""Verifies on the first batch that no sample's loss depends on another sample.

Clipping sees layers, and not the code between them. Code that mixes samples, or that puts another
axis of the same length first, makes norms those of no sample. Two backwards show it, each of the
losses of one half of the samples: the gradient of a trained layer's output must be zero outside of
that half's entries, exactly, since zeros stay zeros on their way. The operating system chooses the
halves, so that code cannot know them.

What it proves: on this batch, the losses of one half do not depend on what trained layers computed
for the other, by any path that autograd differentiates. A mean over all samples is always seen, and
so is one sample on which all others depend; a single loss that depends on a single other sample is
seen in half of the looks. Where gradients are zero, as below a matrix that starts at zero, nothing
is proved, and the next batches are looked at too, ``TRIES`` at most. It does not see values that
reach a loss without a gradient (a count of the batch's tokens, a detached mean), mixing before the
first trained layer or within a half, layers that do not run, other data or later steps. ``company``
and ``Clipping.check`` see some of these, and ``repeated_checks`` repeats both.

Shape legend: B samples, T tokens, p width of an output.
"""

import random
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from itertools import zip_longest

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from dpprof.private.contributions.contributions import (
    ChunkedProduct,
    Contribution,
    Contributions,
    Convolution,
    Lookup,
    Product,
)
from dpprof.private.contributions.sample_gradients import SampleGradients, Scale, Shift
from dpprof.private.errors import BatchAxisError, UnsupportedError
from dpprof.private.graph.layout import Layout
from dpprof.private.ranks.ranks import Ranks

Handler = Callable[[nn.Module, Contributions], None]  # handles a layer's contributions
FIRST_BATCH = ("verified", "trusted")  # how the first batch is treated
TRIES = 10  # the most batches to look at where a layer's gradients are all zero


class FirstBatches:
    """Verifies batches, or trusts them (``FIRST_BATCH``), until each layer that runs was seen."""

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

    def look_again(self) -> None:
        """Verify the coming batches again."""
        self.are_verified, self._looked_at = False, 0

    def expect(self, ways: set[str]) -> None:
        """Verify again where the coming batch is computed in a way that was not verified.

        Ways are how values enter for all samples (``broadcasts``), which rows samples have
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

        The graph of the losses, (B,), stays. ``handling`` lets a function look at every layer's
        contributions, ``parameters`` say on which devices random numbers are drawn, and ``layout``
        notes layers of which it proves nothing. ``UnsupportedError``: samples are mixed.
        """
        if not losses.requires_grad or isinstance(losses, FakeTensor):
            return
        ranks = self._ranks
        if self.are_verified and (self._asks or not ranks.is_sharded):
            # Ranks that run backward together ask each other where one of them found such ways
            # before; elsewhere these are refused (``refuse_late_ways``): other models need not ask.
            (is_due,) = ranks.any(self._are_other)
            if is_due:
                self.look_again()
        if self.are_verified:
            return
        batch = _Batch(losses, self._loss_scale, self._name_of)
        if not batch.has_others and not ranks.is_sharded:
            return
        for half in batch.halves:
            with _random_state_kept(parameters), handling(batch.look):
                weights = batch.choose(half)
                torch.autograd.backward(losses, weights, retain_graph=True)
        problem = layout.problem or batch.problem
        is_incomplete, has_ways = not batch.is_complete, bool(self._ways)
        is_wrong, has_looked, is_incomplete, has_ways = ranks.any(
            problem is not None, batch.has_others, is_incomplete, has_ways
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

    @property
    def has_late_ways(self) -> bool:
        """Whether this batch has ways that ranks with shards did not ask each other about."""
        return self._are_other and not self._asks and self._ranks.is_sharded

    def refuse_late_ways(self) -> None:
        """Refuse a batch that is computed in such ways (``UnsupportedError``)."""
        if self.has_late_ways:
            raise UnsupportedError(
                "code outside of layers lets values enter for all samples, or joins samples and "
                f"tokens ({min(self._ways)}), as no earlier batch did, so ranks did not verify it; "
                "begin with a batch of two samples or more on a rank that runs all of the model"
            )


class _Batch:
    """Looks at two backwards, each of the losses of one half of the samples."""

    def __init__(
        self, losses: Tensor, loss_scale: float, name_of: Callable[[nn.Module], str]
    ) -> None:
        self._name_of, self._losses, self._loss_scale = name_of, losses.detach(), loss_scale
        self._samples = len(losses)
        finite = self._losses.isfinite().nonzero().flatten().tolist()
        self.has_others = bool(finite) and self._samples > 1  # on which a finite loss may depend
        random.SystemRandom().shuffle(finite)
        half = (len(finite) + 1) // 2
        halves = [set(finite[:half]), set(finite[half:])]
        self.halves = halves if self.has_others else [set(), set()]
        """Whose losses are differentiated; none of a batch of one sample."""

        self._chosen: set[int] = set()
        self._looks: list[list[bool]] = []  # by backward: have layers entries of the half?
        self.problem: UnsupportedError | None = None  # of the first such layer

    def choose(self, half: set[int]) -> Tensor:
        """Return the gradient with which the losses of a half are differentiated; (B,)."""
        self._chosen = half
        self._looks.append([])
        weights = torch.zeros_like(self._losses)
        for sample in half:
            weights[sample] = self._loss_scale
        return weights

    @property
    def is_complete(self) -> bool:
        """Whether some sample has a gradient in each layer that ran."""
        return self.has_others and all(map(any, zip_longest(*self._looks)))

    def look(self, layer: nn.Module, contributions: Contributions) -> None:
        for _, contribution in contributions:
            if self.problem is None:
                self.problem = self._find_problem(layer, _gradients_of(contribution))

    def _find_problem(self, layer: nn.Module, gradients: Tensor) -> UnsupportedError | None:
        if self._samples and len(gradients) != self._samples:  # without losses nothing counts
            return BatchAxisError.of(self._name_of(layer), len(gradients), self._samples)
        if not self._chosen:
            return None
        nonzero = _find_nonzero(gradients, 0)
        others = [sample for sample in nonzero if sample not in self._chosen]
        self._looks[-1].append(len(others) < len(nonzero))
        if not others:
            return None
        problem = f"{self._name_of(layer)} saw another axis than samples first, of the same length"
        if not _lies_on_another_axis(gradients, self._chosen):
            problem = (
                f"the loss of a sample depends on what {self._name_of(layer)} computed for "
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
    others = [other for other in range(gradients.dim()) if other != axis]
    largest = torch.linalg.vector_norm(gradients, torch.inf, dim=others)
    places: list[int] = (largest > 0).nonzero().flatten().tolist()
    return places


def _lies_on_another_axis(gradients: Tensor, chosen: set[int]) -> bool:
    """Tell whether samples' entries of (B, T, p) lie on the first or last axis that T has."""
    B, T = len(gradients), gradients.shape[1:2].numel()
    if T % B:
        return False
    shapes = {1: (B, B, T // B, -1), 2: (B, T // B, B, -1)}
    return any(
        _find_nonzero(gradients.reshape(shape), axis) == sorted(chosen)
        for axis, shape in shapes.items()
    )


def _random_state_kept(parameters: Iterable[nn.Parameter]) -> AbstractContextManager[None]:
    """Restore the state of PyTorch's generators at the end of the context."""
    devices = {p.device for p in parameters if p.device.type != "cpu"}
    kind = next((device.type for device in devices), "cuda")
    indices = sorted({device.index for device in devices if device.type == kind})
    return torch.random.fork_rng(devices=indices, device_type=kind)
