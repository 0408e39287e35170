"""Opacus's samplers, which compute a layer's per-sample gradients or their norms.

Opacus chooses by layer, and without a message falls back to ``torch.func`` for a layer without a
rule, also in ghost clipping. So the code path is observed while it runs.

PyTorch gives the row of ``padding_idx`` in a lookup table no gradient. Opacus 1.6.0's rules give it
one, which counts in the samples' norms, and trains the row where the sum is made of per-sample
gradients. So the rules get zeros as the gradients of padding. A test fails once Opacus is fixed.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

from opacus.grad_sample import AbstractGradSampleModule
from opacus.optimizers import DPOptimizer
from torch import Tensor, nn

from dpprof.private.norms.code_paths import Watch
from dpprof.private.substitutes import substitute
from dpprof.subjects.methods.opacus.opacus_paths import OpacusPath

_TABLES = {"GRAD_SAMPLERS": OpacusPath.GRAD_SAMPLER, "NORM_SAMPLERS": OpacusPath.NORM_SAMPLER}
"""Opacus's tables of samplers by type of layer; only ghost clipping has the second."""

Sampler = Callable[[nn.Embedding, list[Tensor], Tensor], dict[nn.Parameter, Tensor]]


def leave_padding_out(module: AbstractGradSampleModule) -> None:
    """Replace the samplers of lookup tables, for this model alone."""
    for table in _TABLES:
        samplers: dict[type[nn.Module], Any] = getattr(module, table, {})
        if nn.Embedding in samplers:
            replaced = partial(_leave_padding_out, samplers[nn.Embedding])
            setattr(module, table, samplers | {nn.Embedding: replaced})


def _leave_padding_out(
    sampler: Sampler, layer: nn.Embedding, activations: list[Tensor], backprops: Tensor
) -> dict[nn.Parameter, Tensor]:
    if layer.padding_idx is not None:
        is_padding = activations[0] == layer.padding_idx
        backprops = backprops.masked_fill(is_padding[..., None], 0)
    return sampler(layer, activations, backprops)


@contextmanager
def watch_hooks(module: AbstractGradSampleModule, watch: Watch) -> Iterator[None]:
    """Watch a model with Opacus's hooks.

    Samplers are replaced where Opacus looks them up, in tables of its classes and on layers,
    because it offers no hook. The last argument of each sampler is the gradient of the layer's
    output.
    """

    def watched(
        path: OpacusPath, sampler: Callable[..., Any], layer: nn.Module, *inputs: Any
    ) -> Any:
        return watch(layer, path, partial(sampler, layer), inputs)

    def watched_functorch(layer: nn.Module, sampler: Callable[..., Any], *inputs: Any) -> Any:
        return watch(layer, OpacusPath.FUNCTORCH, sampler, inputs)

    with ExitStack() as watching:
        for table, path in _TABLES.items():
            samplers = getattr(module, table, {})
            replaced = {kind: partial(watched, path, sampler) for kind, sampler in samplers.items()}
            if replaced:
                watching.enter_context(substitute(module, table, replaced))
        for layer in module.modules():
            own = vars(layer).get("ft_compute_sample_grad")
            if own is not None:
                replacement = partial(watched_functorch, layer, own)
                watching.enter_context(substitute(layer, "ft_compute_sample_grad", replacement))
        yield


def watch_expanded_weights(
    module: nn.Module, optimizer: DPOptimizer, watch: Watch
) -> AbstractContextManager[None]:
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

    return substitute(optimizer, "clip_and_accumulate", look_and_clip)
