"""The base of dpprof's own methods: a ``Clipping``, and a ``NoisyOptimizer``.

Shape legend: B batch.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.refusals import INDEPENDENT
from dpprof.experiments.records.result import NormChoice
from dpprof.experiments.records.terms import Component
from dpprof.private.allocation_marks import Function
from dpprof.private.capture.captured_step import CapturedStep
from dpprof.private.engine.engine import Clipping
from dpprof.private.engine.factor import clip_factor
from dpprof.private.noise.noise_keys import NoiseKeys
from dpprof.private.noise.optimizer import NoisyOptimizer
from dpprof.private.noise.strategies import make_strategy
from dpprof.private.norms.code_paths import Watch
from dpprof.private.norms.triton_ops import chosen_tiles, explain_missing_tiles
from dpprof.private.substitutes import substitute
from dpprof.subjects.methods.losses import losses_of
from dpprof.subjects.methods.training_step import Batch, ClipGroup, Enter, VersatileStep


class ClippedStep(VersatileStep):
    """A step whose gradient a ``Clipping`` clips."""

    clipping_type: type[Clipping]
    optimizer: NoisyOptimizer
    births: ClassVar[Mapping[Function, Component]] = {clip_factor: "norm_samples"}
    """Functions of ``dpprof.private`` that ``allocates`` marks are added."""

    def __init__(self, model: nn.Module, experiment: Experiment) -> None:
        super().__init__(model, experiment)
        self.clipping = self.clipping_type(
            model,
            experiment.max_grad_norm,
            first_batch="trusted",
            loss_scale=experiment.loss_scale,
        )

    def attach_optimizer(self, optimizer: Optimizer) -> None:
        """Wrap the optimizer in one that adds noise, which the experiment's seed decides."""
        device = next(self.module.parameters()).device
        seeded = torch.default_generator
        if device.type == "cuda":
            seeded = torch.cuda.default_generators[device.index]
        strategy = None
        if self.experiment.noise_strategy != INDEPENDENT:
            noise, bands = self.experiment.noise_strategy.split("-")
            # Costs do not depend on the number of steps: it may be any.
            strategy = make_strategy(noise, steps=max(1000, int(bands)), bands=int(bands))
            strategy = strategy._replace(steps=sys.maxsize)
        of_rank = self.experiment.accumulation * self.experiment.batch_size
        self.optimizer = NoisyOptimizer(
            optimizer,
            self.clipping,
            noise_multiplier=self.experiment.noise_multiplier,
            expected_batch_size=self.experiment.world_size * of_rank,
            strategy=strategy,
        )
        self.optimizer.keys = NoiseKeys(source=seeded, rank=self.clipping.ranks.rank)

    def compute_gradient(self, batch: Batch, enter: Enter) -> None:
        """Leave ``(sum of clipped gradients + noise) / B`` in ``.grad``.

        After "noise" follow the calls of the optimizer's ``step``, in its order.
        """
        for part in range(self.experiment.accumulation):
            if part:
                self.optimizer.accumulate()
            enter("forward")
            losses_B = losses_of(self, batch.labels, *batch.inputs)
            self.clipping.backward(losses_B, enter)
        enter("noise")
        self.optimizer.accumulate()
        self.optimizer.add_noise()

    def apply_gradient(self) -> None:
        """Step the wrapped optimizer."""
        self.optimizer.original_optimizer.step()

    def capture(self, batch: Batch) -> Callable[[], object]:
        """Return a captured step; its first one is an ordinary one."""
        step = CapturedStep(partial(losses_of, self), self.optimizer, part_size=len(batch.labels))
        step(batch.labels, *batch.inputs)
        return partial(step, batch.labels, *batch.inputs)

    def held_for(self, parameter: nn.Parameter) -> Iterator[tuple[Component, Any]]:
        """Yield the clipped sums of this part of a batch, which become gradients, and before."""
        sums = self.clipping.sums
        yield "gradients", sums.part.get(parameter)
        yield "summed_gradients", sums.total.get(parameter)

    def clip_groups(self) -> Sequence[ClipGroup]:
        """Return the groups of the clipping."""
        return [ClipGroup(*group) for group in self.clipping.groups]

    def sample_norms(self) -> Tensor | None:
        """Return the samples' norms over all parameters; (B,)."""
        norms = self.clipping.sample_norms
        if norms is None or norms.dim() == 1:
            return norms
        norms_B: Tensor = norms.norm(dim=1)
        return norms_B

    @property
    def norm_plan(self) -> dict[str, NormChoice]:
        """How the norms of each matrix were computed in the last step."""
        return {
            name: NormChoice(
                way=choice.way,
                tokens=choice.T,
                inputs=choice.d,
                outputs=choice.p,
                flops=choice.flops,
                prices=choice.prices,
                tiles=chosen_tiles(choice.way, choice.T, choice.d, choice.p),
            )
            for name, choice in self.clipping.plan.items()
        }

    @property
    def nonfinite_samples(self) -> int:
        """The number of samples that the clipping has left out so far."""
        return self.clipping.nonfinite_samples_total

    @property
    def reasons(self) -> dict[str, str]:
        """Why a Triton kernel did not run where one should have."""
        return explain_missing_tiles()

    def watch_samplers(self, watch: Watch) -> AbstractContextManager[None]:
        """Watch how norms are computed."""
        return substitute(self.clipping, "watch", watch)
