"""Opacus's per-sample gradients from PyTorch's expanded weights.

Layers compute per-sample gradients instead of ordinary ones, so a linear layer costs no more than
the standard step's 6 B T d p FLOPs.
"""

from contextlib import AbstractContextManager

from torch import nn

from dpprof.experiments.config.experiment import Experiment
from dpprof.private.errors import UnsupportedError
from dpprof.private.norms.code_paths import Watch
from dpprof.subjects.methods.opacus.per_sample import OpacusPerSample
from dpprof.subjects.methods.opacus.samplers import watch_expanded_weights


class OpacusEw(OpacusPerSample):
    """``grad_sample_mode="ew"``.

    Raises:
        UnsupportedError: ``bfloat16``: autocast does not reach expanded weights, which then
            multiply a bfloat16 and a float32 matrix. Checkpointing: a recomputed block has no
            expanded weights. A trained lookup table with ``padding_idx``.
    """

    grad_sample_mode = "ew"

    def __init__(self, model: nn.Module, experiment: Experiment) -> None:
        if experiment.autocast_dtype is not None:
            raise UnsupportedError("PyTorch's expanded weights do not work under autocast")
        if experiment.checkpointing != "none":
            raise UnsupportedError("PyTorch's expanded weights do not work under checkpointing")
        tables = (layer for layer in model.modules() if isinstance(layer, nn.Embedding))
        if any(table.padding_idx is not None and table.weight.requires_grad for table in tables):
            raise UnsupportedError(
                "PyTorch's expanded weights give the row of an embedding's padding_idx a gradient, "
                "which it does not have"
            )
        super().__init__(model, experiment)

    def watch_samplers(self, watch: Watch) -> AbstractContextManager[None]:
        """Watch which layers have per-sample gradients."""
        return watch_expanded_weights(self.module, self.optimizer, watch)
