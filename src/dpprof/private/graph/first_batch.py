"""Verifies on the first batch that no sample's loss depends on another sample.

Clipping sees layers, and not the code between them. Code that mixes samples, or that puts another
axis of the same length first, makes norms those of no sample. Two backwards show it: in the second
each loss is multiplied by a power of two of its own, which the operating system draws, so that code
cannot know it. The gradient of a trained layer's output must grow with it in that sample's entries.
Where it does not, a third backward decides, without that sample's loss: its entries must be zero,
exactly, since zeros stay zeros on their way, and rounding errors are none.

What it proves: on this batch, no loss depends on what trained layers computed for another sample,
by any path that autograd differentiates. A loss that depends on many others is always seen; one
that depends on one other sample alone, among more than ``POWERS``, but for one look in so many,
where both have one power. Where gradients are zero, as below a matrix that starts at zero, nothing
is proved, and the next batches are looked at too, ``TRIES`` at most. Where the graph does not show
whose a layer's rows are, and their number alone says it (``layout``), each batch is verified. It
does not see values that reach a loss without a gradient (a count of the batch's tokens, a detached
mean), mixing before the first trained layer, layers that do not run, other data or later steps.
``company`` and ``Clipping.check`` see some of these, and ``repeated_checks`` repeats both.

Shape legend: B samples, T tokens, p width of an output.
"""

import logging
import random
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager

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

_log = logging.getLogger("dpprof")

Handler = Callable[[nn.Module, Contributions], None]  # handles a layer's contributions
FIRST_BATCH = ("verified", "trusted")  # how the first batch is treated
TRIES = 10  # the most batches to look at where a layer's gradients are all zero
POWERS = 16  # different powers of two, of which each loss gets one
_FEW_POWERS = 8  # in 16 bits, whose precision or range is small


class FirstBatches:
    """Verifies batches, or trusts them (``FIRST_BATCH``), until each layer that runs was seen."""

    def __init__(
        self, what: str, loss_scale: float, ranks: Ranks, name_of: Callable[[nn.Module], str]
    ) -> None:
        if what not in FIRST_BATCH:
            raise ValueError(f"first_batch must be one of {FIRST_BATCH}, and is {what!r}")
        self.are_verified = what == "trusted"
        self.verifies, self._has_told = not self.are_verified, False
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

    def expect(self, ways: set[str], doubt: str = "") -> None:
        """Verify the coming batch if there is a ``doubt``, or a way that was not verified.

        Ways are how values enter for all samples (``broadcasts``), which rows samples have
        (``layout``), and settings (``batch_axis``).
        """
        self._ways = ways
        self._are_other = self._verified_ways is not None and (
            bool(doubt) or not ways <= self._verified_ways
        )
        if doubt and self.verifies and not self._has_told:
            self._has_told = True
            _log.warning(
                "%s, by two more backward passes; first_batch='trusted' leaves that out, for code "
                "that keeps samples in order",
                doubt,
            )

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
        for weights in batch.choose_weights(ranks):
            with _random_state_kept(parameters), handling(batch.look):
                ranks.differentiate(losses, weights, keeps_graph=True)
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
    """Looks at backwards of the losses, (B,), each of which has a weight of its own."""

    def __init__(
        self, losses: Tensor, loss_scale: float, name_of: Callable[[nn.Module], str]
    ) -> None:
        self._name_of, self._losses, self._loss_scale = name_of, losses.detach(), loss_scale
        self._samples = len(losses)
        finite = self._losses.isfinite().nonzero().flatten().tolist()
        self.has_others = bool(finite) and self._samples > 1  # on which a finite loss may depend
        self._finite = finite if self.has_others else []
        self._weights: dict[int, float] = {}  # of samples; 0 for others
        self._sizes: list[list[Tensor]] = []  # by backward: of the entries of all layers, (B,) each
        self._powers = POWERS
        self._chosen: set[int] | None = None  # whose losses count, once one is left out
        self.problem: UnsupportedError | None = None  # of the first layer that has one

    def choose_weights(self, ranks: Ranks) -> Iterator[Tensor]:
        """Yield the weights of the losses, (B,), of each backward; as often on all ranks."""
        yield self._weigh(dict.fromkeys(self._finite, 1.0))
        yield self._weigh(_draw_powers(self._finite, self._powers))
        waiting = [] if self.problem else self._find_suspects()
        while any(ranks.any(bool(waiting) and self.problem is None)):
            self._chosen = set(self._finite) - set(waiting[-1:])
            waiting = waiting[:-1]
            yield self._weigh(dict.fromkeys(self._chosen, 1.0))

    def _weigh(self, weights: dict[int, float]) -> Tensor:
        self._weights = weights
        self._sizes.append([])
        numbers = [weights.get(sample, 0.0) for sample in range(self._samples)]
        return self._losses.new_tensor(numbers) * self._loss_scale

    def _find_suspects(self) -> list[int]:
        """List the samples whose entries did not grow as their losses did."""
        if len({len(sizes) for sizes in self._sizes}) > 1:  # other layers ran
            return list(range(self._samples))
        suspects: set[int] = set()
        expected_B = [self._weights.get(sample, 0.0) for sample in range(self._samples)]
        for first_B, second_B in zip(*self._sizes, strict=True):
            grown_B = first_B * first_B.new_tensor(expected_B)
            is_near_B = (second_B - grown_B).abs() <= grown_B * 4 / 2**self._powers
            suspects.update((~is_near_B).nonzero().flatten().tolist())
        return sorted(suspects)

    @property
    def is_complete(self) -> bool:
        """Whether some sample has a gradient in each layer that ran."""
        return self.has_others and all(bool((sizes_B > 0).any()) for sizes_B in self._sizes[0])

    def look(self, layer: nn.Module, contributions: Contributions) -> None:
        """Look at what a layer contributes to a backward."""
        for _, contribution in contributions:
            gradients = _gradients_of(contribution)
            if self.problem is None:
                self.problem = self._find_problem(layer, gradients)
            if self.problem is None and self._chosen is None and self._finite:
                if gradients.dtype.itemsize < 4:  # noqa: PLR2004
                    self._powers = _FEW_POWERS
                self._sizes[-1].append(_find_sizes(gradients, 0).double())

    def _find_problem(self, layer: nn.Module, gradients: Tensor) -> UnsupportedError | None:
        if self._samples and len(gradients) != self._samples:  # without losses nothing counts
            return BatchAxisError.of(self._name_of(layer), len(gradients), self._samples)
        if self._chosen is None or set(_find_nonzero(gradients, 0)) <= self._chosen:
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


def _draw_powers(samples: list[int], count: int) -> dict[int, float]:
    """Draw one of ``count`` powers of two for each sample; as few as possible are alike."""
    count = min(count, len(samples))
    system, powers = random.SystemRandom(), [2.0 ** (n - count // 2) for n in range(count)]
    drawn: list[float] = []
    while len(drawn) < len(samples):
        drawn += system.sample(powers, count)
    return dict(zip(samples, drawn, strict=False))


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


def _find_sizes(gradients: Tensor, axis: int) -> Tensor:
    """Return the largest number at each place on an axis; NaN counts as zero."""
    if not gradients.numel():  # of a layer without width
        return gradients.new_zeros(gradients.shape[axis], dtype=torch.float32)
    others = [other for other in range(gradients.dim()) if other != axis]
    sizes: Tensor = torch.linalg.vector_norm(gradients, torch.inf, dim=others)
    return sizes.nan_to_num(0, torch.inf)


def _find_nonzero(gradients: Tensor, axis: int) -> list[int]:
    """List the places on an axis where something is not zero."""
    places: list[int] = (_find_sizes(gradients, axis) > 0).nonzero().flatten().tolist()
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
