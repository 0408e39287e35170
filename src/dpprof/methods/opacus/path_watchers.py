"""Watches which code path each layer takes to its per-sample gradients or their norms.

Opacus chooses by layer, and without a message falls back to ``torch.func`` for a layer without a
rule, also in ghost clipping. So the path is observed while it runs.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from opacus.grad_sample import AbstractGradSampleModule
from opacus.optimizers import DPOptimizer
from torch import nn

from dpprof.methods.opacus.opacus_paths import OpacusPath
from dpprof.methods.opacus.padded_lookups import SAMPLER_TABLES
from dpprof.norms.code_paths import Watch
from dpprof.system.substitutes import substitute

_PATHS = dict(zip(SAMPLER_TABLES, (OpacusPath.GRAD_SAMPLER, OpacusPath.NORM_SAMPLER), strict=True))


@contextmanager
def watch_hooks(module: AbstractGradSampleModule, watch: Watch) -> Iterator[None]:
    """Watch a model with Opacus's hooks.

    Samplers are replaced where Opacus looks them up, in tables of its classes and on layers,
    because it offers no hook. The last argument of each sampler is the gradient of the layer's
    output.
    """

    def watched(path: OpacusPath, sampler: Callable[..., Any]) -> Callable[..., Any]:
        def sample(layer: nn.Module, *inputs: Any) -> Any:
            return watch(layer, path, lambda *given: sampler(layer, *given), inputs)

        return sample

    def watched_functorch(layer: nn.Module, sampler: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *inputs: watch(layer, OpacusPath.FUNCTORCH, sampler, inputs)

    with ExitStack() as watching:
        for table, path in _PATHS.items():
            samplers = getattr(module, table, {})
            replaced = {kind: watched(path, sampler) for kind, sampler in samplers.items()}
            if replaced:
                watching.enter_context(substitute(module, table, replaced))
        for layer in module.modules():
            own = vars(layer).get("ft_compute_sample_grad")
            if own is not None:
                replacement = watched_functorch(layer, own)
                watching.enter_context(substitute(layer, "ft_compute_sample_grad", replacement))
        yield


@contextmanager
def watch_expanded_weights(
    module: nn.Module, optimizer: DPOptimizer, watch: Watch
) -> Iterator[None]:
    """Watch a model with expanded weights: which layers have per-sample gradients at clipping.

    Expanded weights have no sampler, and the optimizer has no hook before clipping.
    """
    clip_and_accumulate = optimizer.clip_and_accumulate

    def look_and_clip() -> None:
        for layer in module.modules():
            own = layer.parameters(recurse=False)
            if any(getattr(parameter, "grad_sample", None) is not None for parameter in own):
                watch(layer, OpacusPath.EXPANDED_WEIGHTS, lambda: None, ())
        clip_and_accumulate()

    with substitute(optimizer, "clip_and_accumulate", look_and_clip):
        yield
