"""What methods of this repository share: a ``Clipping``, and Opacus's noise.

Shape legend: B batch, T tokens, V vocabulary.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn import functional
from torch.optim import Optimizer

from dpprof.clipping.engine import Clipping
from dpprof.clipping.optimizer import NoisyOptimizer
from dpprof.experiment import Experiment
from dpprof.methods.base import Batch, Enter, TrainingStep, Watch, finds_norms
from dpprof.methods.opacus_optimizer import wrap_optimizer
from dpprof.norms.fused import tell_reasons, tell_tiles
from dpprof.norms.precision import exact_products
from dpprof.result import Component, NormChoice


class ClippedStep(TrainingStep):
    """One step whose gradient a ``Clipping`` clips."""

    clipping_type: type[Clipping]
    optimizer: NoisyOptimizer
    attributes: ClassVar[Mapping[str, Component]] = {"summed_grad": "summed_gradients"}
    births: ClassVar[Mapping[str, Component]] = {
        "opacus.optimizers.optimizer:_generate_noise": "noise",
        "dpprof.norms.linear:_gram_tile": "gram_matrices",
        "dpprof.clipping.engine:weigh": "norm_samples",
        "dpprof.clipping.engine:Clipping._settle_norms": "norm_samples",
        "dpprof.clipping.factor:clip_factor": "norm_samples",
    }

    def __init__(self, model: nn.Module, experiment: Experiment) -> None:
        super().__init__(model, experiment)
        self.clipping = self.clipping_type(model, experiment.max_grad_norm)
        self.clipping.watch = partial(_watch_exact, self.clipping.watch)

    def attach_optimizer(self, optimizer: Optimizer) -> None:
        """Wrap the optimizer for noise."""
        self.optimizer = wrap_optimizer(NoisyOptimizer, optimizer, self.experiment)

    def compute_gradient(self, batch: Batch, enter: Enter) -> None:
        """Leave ``(sum of clipped gradients + noise) / B`` in ``.grad``.

        From "noise" on these are the calls of Opacus's ``pre_step``, in its order.
        """
        enter("forward")
        losses_B = sample_losses(self.module(batch.tokens_BT), batch.labels_BT)
        self.clipping.backward(losses_B, enter)
        enter("noise")
        self.optimizer.accumulate()
        self.optimizer.add_noise()
        self.optimizer.scale_grad()

    def apply_gradient(self) -> None:
        """Let the wrapped optimizer use the gradients."""
        self.optimizer.original_optimizer.step()

    def sample_norms(self) -> Tensor | None:
        """Tell the norms that the clipping left, over all parameters; (B,)."""
        norms = self.clipping.sample_norms
        if norms is None or norms.dim() == 1:
            return norms
        norms_B: Tensor = norms.norm(dim=1)
        return norms_B

    @property
    def norm_plan(self) -> dict[str, NormChoice]:
        """Which way each matrix's norms went in the last step."""
        return {
            name: NormChoice(
                way=choice.way,
                tokens=choice.T,
                inputs=choice.d,
                outputs=choice.p,
                flops=choice.flops,
                prices=choice.prices,
                tiles=tell_tiles(choice.way, choice.T, choice.d, choice.p),
            )
            for name, choice in self.clipping.plan.items()
        }

    @property
    def reasons(self) -> dict[str, str]:
        """Say why no kernel ran, where one should have."""
        return tell_reasons()

    @contextmanager
    def watch_samplers(self, watch: Watch) -> Iterator[None]:
        """Watch how norms are found."""
        before, self.clipping.watch = self.clipping.watch, partial(_watch_exact, watch)
        try:
            yield
        finally:
            self.clipping.watch = before


def _watch_exact(
    watch: Watch, layer: nn.Module, path: str, sampler: Any, inputs: tuple[Any, ...]
) -> Any:
    """Watch a sampler; where it finds norms its products are float32, whatever is allowed."""
    if not finds_norms(path):
        return watch(layer, path, sampler, inputs)
    with exact_products():
        return watch(layer, path, sampler, inputs)


def sample_losses(logits_BTV: Tensor, labels_BT: Tensor) -> Tensor:
    """Average the cross-entropy over the tokens of each sample; (B,)."""
    losses = functional.cross_entropy(
        logits_BTV.flatten(0, 1), labels_BT.flatten(), reduction="none"
    )
    return losses.view(labels_BT.shape).mean(1)
