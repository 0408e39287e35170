"""Flash clipping: norms in one backward pass, the clipped sum in a second.

Source: fast gradient clipping (Goodfellow 2015; Lee and Kifer 2021, "Scaling up
Differentially Private Deep Learning with Fast Per-Example Gradient Clipping"), with norms that
need neither per-sample gradients nor T x T matrices. The first pass computes no gradients of
parameters; the second frees the graph. Other implementations differentiate weighted losses in the
second pass. Here both passes differentiate the same losses, and each layer weights its own sum:
the second pass sums the gradients whose norms the first pass found, and can exclude samples that
are not finite. ``projections`` verifies that they are the same. Samples that are unsure
(``norms.rounding``) are measured alone in one more pass between these, which all ranks of
``fully_shard`` run if one does; the pass that sums adds the same gradients, or the batch is
refused.

Cost for a linear layer of d x p over T tokens: 2 B T d p FLOPs each for forward, inputs'
gradients twice and weights' gradients, 8 B T d p, and the norm (``norms.linear``).
Memory beyond an ordinary step: the graph, kept for the second pass; B norms, and what
``projections`` keeps; at most ``norms.tiles.WORKSPACE_BYTES`` while a norm is computed; one layer's
weighted activations or output gradients, whichever are narrower.
"""

from collections import Counter, defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from dpprof.private.contributions.alone import Alone, Taken
from dpprof.private.contributions.contributions import (
    Contribution,
    Contributions,
    Kept,
    materialise_vector,
)
from dpprof.private.contributions.projections import Projections
from dpprof.private.contributions.sample_gradients import GradientsInParts
from dpprof.private.engine.batch import Batch, Enter
from dpprof.private.engine.engine import Clipping
from dpprof.private.graph.first_batch import Handler


class _TwoPasses(Batch):
    """A batch of which nothing but the graph is kept between two backward passes."""

    clipping: "FlashClipping"

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._projections: Projections | None = None
        self._uses: Counter[nn.Parameter] = Counter()  # where samples were measured alone
        self._taken: dict[nn.Parameter, list[Taken]] = defaultdict(list)  # of the uses so far
        self._weights_B = self.losses

    def clip(self, enter: Enter) -> None:
        if len(self.losses):
            self._projections = self.clipping.project(self.losses)
        enter("backward")
        self._weights_B = self.make_weights()
        self._run_first_pass(self.norms.add)
        enter("clip")
        factors_B = self.find_factors()
        enter("second_backward")
        with self.handling(partial(self._add_layer, factors_B)):
            self.ranks.differentiate(self.losses, self._weights_B)
        self._refuse_difference()
        self._projections = None

    def _run_first_pass(self, handler: Handler) -> None:
        with self.handling(handler):
            self.ranks.differentiate(self.losses, self._weights_B, keeps_graph=True)

    def measure_alone(self, samples: Sequence[int]) -> Alone | None:
        if not any(self.ranks.any(bool(samples))):
            return None
        alone = Alone(samples)
        self._run_first_pass(partial(self._measure_layer, alone))
        for parameter in list(self._taken):
            alone.measure(self._join_uses(parameter))
        return alone

    def _measure_layer(self, alone: Alone, _layer: nn.Module, contributions: Contributions) -> None:
        for parameter, contribution in contributions:
            self._uses[parameter] += 1
            self._taken[parameter].append(alone.take([contribution]))
            if parameter not in self.reused:
                alone.measure(self._join_uses(parameter))

    def _take_use(self, parameter: nn.Parameter, contribution: Contribution) -> Taken:
        """Take the samples that are added alone out of a use; return all uses with the last."""
        if self.alone is None:
            return {}
        self._taken[parameter].append(self.alone.take([contribution]))
        self._uses[parameter] -= 1
        return {} if self._uses[parameter] else self._join_uses(parameter)

    def _join_uses(self, parameter: nn.Parameter) -> Taken:
        joined: dict[int, list[Contribution]] = defaultdict(list)
        for taken in self._taken.pop(parameter):
            for sample, uses in taken.items():
                joined[sample] += uses
        return joined

    def keep(self, parameter: nn.Parameter, contribution: Kept) -> None:
        assert self._projections is not None
        assert not isinstance(contribution, GradientsInParts)  # nothing is kept
        self._projections.note(parameter, contribution, is_measured=True)

    def _add_layer(
        self, factors_B: Tensor, _layer: nn.Module, contributions: Contributions
    ) -> None:
        shard_sums = self.clipping.shard_sums
        for parameter, use in contributions:
            if self.ranks.is_sharded:
                shard_sums.begin_use(parameter)
            contribution = materialise_vector(use)
            if self._projections is not None:
                self._projections.note(parameter, contribution, is_measured=False)
            taken = self._take_use(parameter, use)
            self.add_up(parameter, [contribution], factors_B, taken)
            if self.ranks.is_sharded:
                shard_sums.end_use(parameter)

    def _refuse_difference(self) -> None:
        if self._projections is None:
            return
        scale = self.clipping.loss_scale
        least = self.clipping.find_least_norm(self.clipping.max_grad_norm)
        differs_B = self._projections.compare(
            self.sample_norms * scale, least * scale, self.excluded_B
        )
        if self.deferral is not None:
            self.deferral.flag(differs_B)
            return
        parameter = self._projections.find_difference(differs_B)
        differs_alone = self.alone is not None and self.alone.differ
        if parameter is not None or differs_alone:
            which = "a sample" if parameter is None else self.clipping.name_of(parameter)
            raise RuntimeError(
                f"another gradient of {which} was summed than measured, so "
                "samples could exceed the bound: code that the second backward runs again draws "
                "other random numbers, counts its calls, or reads what changed; checkpoint with "
                "preserve_rng_state=True, draw with PyTorch's generators alone, or use "
                "BookKeeping, which needs one pass"
            )


class FlashClipping(Clipping):
    """Flat clipping in two backward passes, which keeps nothing but the graph.

    A batch in which a sample's tokens cancel takes a third.

    Arguments, errors and what happens to NaN, infinity, zero and empty batches: ``Clipping``.

    Formal guarantees: those of ``Clipping``; the sum of all parameters' gradients has L2
    sensitivity ``max_grad_norm`` under adding or removing one sample. The second pass must see the
    gradients that the first measured, whatever the model draws, counts or reads in between. Random
    projections compare them (``projections``): in float32 a sample that would contribute C (1 + r)
    is accepted with a probability of about 2^-12 / r, and in 16 bits on a GPU 2^-5 / r.

    Example:
        >>> import torch
        >>> from dpprof.private import FlashClipping
        >>> model = torch.nn.Linear(3, 1, bias=False)
        >>> clipping = FlashClipping(model, max_grad_norm=0.5)
        >>> clipping.backward(model(torch.ones(2, 3)).squeeze(1))  # each gradient is (1, 1, 1)
        >>> round(float(model.weight.grad.norm()), 4)  # two of norm 0.5, in one direction
        1.0
    """

    _batch_type = _TwoPasses

    def __init__(self, model: nn.Module, max_grad_norm: float, **options: Any) -> None:
        super().__init__(model, max_grad_norm, **options)
        self._generators: dict[torch.device, torch.Generator] = {}

    @property
    def generators(self) -> list[torch.Generator]:
        """The sources of random directions that were used."""
        return list(self._generators.values())

    def project(self, losses: Tensor) -> Projections:
        """Return the random projections of one batch; a model cannot know their seed."""
        if isinstance(losses, FakeTensor):
            return Projections(self._coverage, losses, None)
        if losses.device not in self._generators:
            self._generators[losses.device] = generator = torch.Generator(losses.device)
            generator.seed()
        return Projections(self._coverage, losses, self._generators[losses.device])
