"""One batch in its backward: its norms, its factors, who is excluded, and its sums."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from dpprof.private.allocation_marks import allocates
from dpprof.private.contributions.alone import Alone, Taken
from dpprof.private.contributions.contributions import (
    Contributions,
    Kept,
    device_of,
    zero_samples,
)
from dpprof.private.contributions.sample_gradients import SampleGradients
from dpprof.private.contributions.sample_norms import SampleNorms
from dpprof.private.contributions.sums import dtype_of_sum
from dpprof.private.engine.factor import LEAST_FACTOR, clip_factor
from dpprof.private.errors import BatchAxisError
from dpprof.private.graph.broadcasts import Broadcasts
from dpprof.private.graph.first_batch import Handler
from dpprof.private.graph.layout import Layout
from dpprof.private.graph.rows import Rows
from dpprof.private.norms.complex_numbers import as_parameter
from dpprof.private.norms.rounding import LEAST_NORM
from dpprof.private.samples.users import Segments

if TYPE_CHECKING:
    from dpprof.private.engine.engine import Clipping

Enter = Callable[[Any], None]


class Batch(ABC):
    """A batch from its losses, (B,), to its clipped sums; it is thrown away when these are there.

    More than one contribution may be for parameters that are ``reused``. With ``users``, whose
    samples are clipped as one, B of all but losses is the number of users.
    """

    def __init__(
        self,
        clipping: "Clipping",
        losses: Tensor,
        layout: Layout,
        broadcasts: Broadcasts,
        reused: Collection[nn.Parameter],
        *,
        users: Segments | None = None,
    ) -> None:
        self.clipping, self.ranks, self.deferral = clipping, clipping.ranks, clipping.deferral
        self.losses, self.layout, self.broadcasts = losses, layout, broadcasts
        self.reused, self._users = reused, users
        self._rows = None if users is None else Rows.in_segments(users.sizes)
        self.own_losses = losses.detach()  # (B,) of what is clipped
        if users is not None and self._rows is not None:
            self.own_losses = self._rows.sum(self.own_losses * users.share_of(losses))

        self.changed: list[tuple[nn.Module, Tensor]] = []  # (B,): outputs of layers differed again
        self.sample_norms = self.own_losses  # (B,) before clipping, once they are known
        self.nonfinite_B: Tensor | None = None  # loss or norm is not finite; None for no sample
        self.excluded_B: Tensor | None = None  # factor 0: not finite, or added one by one
        self.alone: Alone | None = None  # the samples that are added one by one
        self.norms = SampleNorms(
            self.own_losses,
            reused,
            self.keep,
            keeps=clipping.keeps,
            shares=self.ranks.is_sharded,
            loss_scale=clipping.loss_scale,
            deferral=self.deferral,
            watch=clipping.watch,
            squares=clipping.squares,
            name_of=clipping.name_of,
            why_once=clipping.why_once,
        )

    @abstractmethod
    def clip(self, enter: Enter) -> None:
        """Run backward, add up the clipped gradients, and set ``sample_norms``."""

    @abstractmethod
    def keep(self, parameter: nn.Parameter, contribution: Kept) -> None:
        """Keep a contribution for the clipped sum, unless another pass computes it again."""

    @abstractmethod
    def measure_alone(self, samples: Sequence[int]) -> Alone | None:
        """Measure samples one by one; where ranks are sharded, all call this."""

    @allocates("norm_samples")
    def make_weights(self) -> Tensor:
        """Return the gradient with which the losses are differentiated; as many."""
        weights = torch.full_like(self.losses, self.clipping.loss_scale)
        return weights if self._users is None else weights * self._users.share_of(weights)

    def handling(self, handler: Handler) -> AbstractContextManager[None]:
        """Let ``handler`` take what samples, or users, contribute inside the context."""
        rows, name_of = self._rows, self.clipping.name_of
        if rows is None:
            return self.clipping.handling(handler)

        def join(layer: nn.Module, uses: Contributions) -> None:
            for parameter, use in uses:
                if len(use[0]) != rows.count:  # later they are as many as there are users
                    raise BatchAxisError.of(name_of(parameter), len(use[0]), rows.count)
            handler(layer, [(p, rows.group_contribution(use)) for p, use in uses])

        return self.clipping.handling(join)

    @torch.no_grad()
    def find_factors(self) -> Tensor:
        """Set ``sample_norms`` once backward is over, and return the clipping factors; (B,)."""
        self.refuse_changed_outputs()
        self.norms.add_reused()
        bound = self.clipping.max_grad_norm
        self.sample_norms, unsure_B = self.compute_norms(bound)
        if self.ranks.is_sharded:
            self.clipping.agree()
        return self.compute_factors(self.sample_norms, unsure_B, bound)

    def compute_norms(self, bound: float) -> tuple[Tensor, Tensor]:
        """Compute the norms of gradients as they are without ``loss_scale``; which are unsure."""
        least = max(self.clipping.find_least_norm(bound), LEAST_NORM)
        norms_B, unsure_B = self.norms.compute(least)
        scale = self.clipping.loss_scale
        return norms_B if scale == 1 else norms_B / scale, unsure_B

    def compute_factors(self, norms_B: Tensor, unsure_B: Tensor, bound: float) -> Tensor:
        """Compute factors, 0 for what is not finite or is added alone, whose norms are mended."""
        self.excluded_B = self.alone = None
        factors_B = self._clip_factor(norms_B, bound)
        is_lost_B = ~self.own_losses.to(norms_B.device).isfinite()
        unsure_B = unsure_B | ~norms_B.isfinite() | (factors_B < LEAST_FACTOR)
        if self.deferral is not None:
            self.deferral.flag(is_lost_B | unsure_B)
            return factors_B * self.deferral.weights_B.to(factors_B)
        flags_2B = torch.stack([is_lost_B, unsure_B])
        # A fake tensor has no values; otherwise this waits for the device.
        lost, unsure = [[], []] if isinstance(flags_2B, FakeTensor) else flags_2B.tolist()
        samples = [sample for sample, flag in enumerate(unsure) if flag and not lost[sample]]
        if samples or self.ranks.is_sharded:
            self.alone = self.measure_alone(samples)
        if not (samples or any(lost)):
            return factors_B
        for sample in samples:
            lost[sample] = not self._set_factor(sample, norms_B, bound)
        nonfinite_B = norms_B.new_tensor(lost, dtype=torch.bool)
        before_B = self.nonfinite_B
        self.nonfinite_B = (
            nonfinite_B if before_B is None else before_B | nonfinite_B.to(before_B.device)
        )
        for sample in samples:
            lost[sample] = True
        self.excluded_B = norms_B.new_tensor(lost, dtype=torch.bool)
        return factors_B.masked_fill(self.excluded_B, 0)

    def _clip_factor(self, norms_B: Tensor, bound: float) -> Tensor:
        stability, scale = self.clipping.stability, self.clipping.loss_scale
        psac = self.clipping.is_psac
        return clip_factor(norms_B, bound, stability, scale, psac=psac)

    def _set_factor(self, sample: int, norms_B: Tensor, bound: float) -> bool:
        """Set norm and factor of a sample that is added alone; tell whether it is finite."""
        assert self.alone is not None
        square = torch.tensor(self.alone.squares[sample], dtype=torch.float64)
        norms_B[sample] = norm = square.sqrt() / self.clipping.loss_scale
        if not math.isfinite(norms_B[sample]):
            return False
        self.alone.factors[sample] = float(self._clip_factor(norm, bound))
        return True

    def add_up(
        self,
        parameter: nn.Parameter,
        contributions: Sequence[Kept],
        factors_B: Tensor,
        taken: Taken,
    ) -> None:
        """Add a weighted sum over samples, and what is ``taken`` alone, with autograd off."""
        if not len(factors_B):  # it belongs to no sample
            return
        for contribution in contributions:
            kept = contribution
            if self.excluded_B is not None:
                kept = zero_samples(contribution, self.excluded_B)
            on_device_B = factors_B.to(device_of(kept))
            if self.ranks.is_sharded:
                summed = sum_whole(kept, on_device_B)
            else:
                summed = kept.sum(on_device_B)
            if self.alone is not None:
                self.alone.add(taken, summed)
                taken = {}
            summed = as_parameter(summed, parameter)
            if self.ranks.is_sharded:
                self.clipping.shard_sums.add(parameter, summed)
            else:
                self.clipping.sums.add(parameter, summed.to(dtype_of_sum(parameter)))

    def add_up_vectors(
        self, vectors: Sequence[tuple[nn.Parameter, Tensor]], factors_B: Tensor
    ) -> None:
        """Sum the per-sample gradients of vectors, (B, p) each, over samples; add the sums."""
        joined: Kept = SampleGradients(torch.cat([gradients for _, gradients in vectors], dim=1))
        if self.excluded_B is not None:
            joined = zero_samples(joined, self.excluded_B)
        summed = joined.sum(factors_B.to(device_of(joined)))
        sizes = [gradients.shape[1] for _, gradients in vectors]
        # Views of one tensor would keep the memory of all as long as one of them is there.
        own = [summed.new_empty(size) for size in sizes]
        torch._foreach_copy_(own, torch.split(summed, sizes))
        for (parameter, _), part in zip(vectors, own, strict=True):
            summed = as_parameter(part, parameter)
            self.clipping.sums.add(parameter, summed.to(dtype_of_sum(parameter)))

    def throw_away(self) -> None:
        """Let go of everything, also where a traceback still holds the batch."""
        # The graph's nodes of parameters would remember this stream for ever.
        self.broadcasts.remove()
        vars(self).clear()

    def refuse_changed_outputs(self) -> None:
        """Refuse layers whose outputs were others when they ran again in backward."""
        for layer, changed_B in self.changed:
            if self.deferral is not None:
                self.deferral.flag(changed_B)
            elif not isinstance(changed_B, FakeTensor) and any(changed_B.tolist()):
                raise RuntimeError(
                    f"{self.clipping.name_of_layer(layer)} gave another output when it ran again "
                    "for per-sample gradients: it has no rule, and draws numbers, counts its "
                    "calls, reads what changed or gets the entries of samples in another order; "
                    "move that out of the layer, name a module around it that gets and returns "
                    "samples in as_one=[...], or freeze its parameters"
                )
        self.changed.clear()


@allocates("unsharded_gradients")
def sum_whole(contribution: Kept, factors_B: Tensor) -> Tensor:
    """Sum a contribution over samples to what a reduce-scatter splits among ranks."""
    return contribution.sum(factors_B)
