"""Non-private training: the baseline of every ratio."""

from collections.abc import Callable, Collection, Sequence
from typing import ClassVar

import torch

from dpprof.experiments.config.mechanisms import NO_CLIPPING
from dpprof.private.capture.cuda_graphs import CudaGraphs, make_capturable
from dpprof.subjects.methods.losses import losses_of
from dpprof.subjects.methods.training_step import Batch, ClipGroup, Enter, VersatileStep
from dpprof.subjects.models.distribute import exchange_gradients


class Standard(VersatileStep):
    """Plain SGD or AdamW on the mean loss, without clipping and noise."""

    mechanism: ClassVar[str] = NO_CLIPPING
    exchanges: ClassVar[Collection[str]] = ("last", "each")

    def compute_gradient(self, batch: Batch, enter: Enter) -> None:
        """Leave the gradient of the mean loss in ``.grad``."""
        scale, accumulation = self.experiment.loss_scale, self.experiment.accumulation
        ranks = self.experiment.parallel
        waits = ranks is not None and ranks.exchange == "last"
        for part in range(accumulation):
            if waits and accumulation > 1:
                exchange_gradients(self.module, part == accumulation - 1)
            enter("forward")
            loss = losses_of(self, batch.labels, *batch.inputs).mean()
            enter("backward")
            if accumulation > 1:
                loss = loss / accumulation
            torch.autograd.backward(loss if scale == 1 else scale * loss)
        if scale != 1:
            gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
            torch._foreach_div_(gradients, scale)

    def capture(self, batch: Batch) -> Callable[[], object]:
        """Return what runs the step as one CUDA graph."""
        graphs = CudaGraphs(batch.x.device, list)
        make_capturable(self.optimizer)

        def run() -> None:
            self.run(batch, lambda _: None)

        graphs.warm_up(run, lambda: None)
        return graphs.capture(run)[0]

    def clip_groups(self) -> Sequence[ClipGroup]:
        """Return no group, because nothing is clipped."""
        return ()
