"""Which way each type of layer really took to its per-sample gradient, or to its norm.

Opacus chooses per layer and falls back without a word: to ``torch.func`` where it has no
rule for a layer, inside ghost clipping too. What is told here was seen while it ran.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from opacus.grad_sample import GradSampleHooks, GradSampleHooksFastGradientClipping
from opacus.optimizers import DPOptimizer
from torch import nn

from dpprof.methods.opacus.paths import OpacusPath
from dpprof.methods.training_step import Watch
from dpprof.spec.experiment import Experiment
from dpprof.spec.registry import UnsupportedError
from dpprof.system.substitutes import substitute


def refuse_checkpointing(experiment: Experiment) -> None:
    """Refuse what Opacus's hooks do not survive.

    Raises:
        UnsupportedError: ``non-reentrant``: hooks count a layer's forward again when it is
            computed again, and find gradients for none or too many.
    """
    if experiment.checkpointing == "non-reentrant":
        raise UnsupportedError(
            "Opacus's hooks do not work under non-reentrant checkpointing; use reentrant"
        )


@contextmanager
def watch_hooks(module: GradSampleHooks, watch: Watch) -> Iterator[None]:
    """Watch a model with Opacus's hooks.

    The last argument of each sampler is the gradient of the layer's output. Opacus looks samplers
    up in tables of its classes and on layers, and has no other place to watch them.
    """

    def watched(path: OpacusPath, sampler: Callable[..., Any]) -> Callable[..., Any]:
        def sample(layer: nn.Module, *inputs: Any) -> Any:
            return watch(layer, path, lambda *given: sampler(layer, *given), inputs)

        return sample

    def watched_functorch(layer: nn.Module, sampler: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *inputs: watch(layer, OpacusPath.FUNCTORCH, sampler, inputs)

    with ExitStack() as watching:
        tables = {"GRAD_SAMPLERS": OpacusPath.GRAD_SAMPLER}
        if isinstance(module, GradSampleHooksFastGradientClipping):
            tables["NORM_SAMPLERS"] = OpacusPath.NORM_SAMPLER
        for table, path in tables.items():
            samplers = getattr(type(module), table)
            replaced = {kind: watched(path, sampler) for kind, sampler in samplers.items()}
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
    """Watch a model with expanded weights: who has per-sample gradients when clipping begins.

    They have no sampler of their own to call, and the optimizer no hook before clipping.
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
