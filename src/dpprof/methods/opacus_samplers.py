"""Which way each type of layer really took to its per-sample gradient, or to its norm.

Opacus chooses per layer and falls back without a word: to ``torch.func`` where it has no
rule for a layer, inside ghost clipping too. What is told here was seen while it ran.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from opacus.grad_sample.grad_sample_module import GradSampleHooks
from opacus.optimizers import DPOptimizer
from torch import nn

from dpprof.methods.training_step import Watch
from dpprof.spec.experiment import Experiment
from dpprof.spec.registry import UnsupportedError


def _replace(watching: ExitStack, owner: object, name: str, value: object) -> None:
    """Set an attribute of this one object until the watch is over."""
    own = vars(owner)
    if name in own:
        watching.callback(setattr, owner, name, own[name])
    else:
        watching.callback(delattr, owner, name)
    setattr(owner, name, value)


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

    Code paths: a ``norm sampler`` finds norms without per-sample gradients, a ``grad sampler``
    is Opacus's rule for a layer's per-sample gradients, ``functorch`` is what is left. The
    last argument of each is the gradient of the layer's output.
    """

    def watched(path: str, sampler: Callable[..., Any]) -> Callable[..., Any]:
        def sample(layer: nn.Module, *inputs: Any) -> Any:
            return watch(layer, path, lambda *given: sampler(layer, *given), inputs)

        return sample

    def watched_functorch(layer: nn.Module, sampler: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *inputs: watch(layer, "functorch", sampler, inputs)

    with ExitStack() as watching:
        for table, path in (("GRAD_SAMPLERS", "grad sampler"), ("NORM_SAMPLERS", "norm sampler")):
            samplers = getattr(type(module), table, {})
            replaced = {kind: watched(path, sampler) for kind, sampler in samplers.items()}
            _replace(watching, module, table, replaced)
        for layer in module.modules():
            own = vars(layer).get("ft_compute_sample_grad")
            if own is not None:
                _replace(watching, layer, "ft_compute_sample_grad", watched_functorch(layer, own))
        yield


@contextmanager
def watch_expanded_weights(
    module: nn.Module, optimizer: DPOptimizer, watch: Watch
) -> Iterator[None]:
    """Watch a model with expanded weights: who has per-sample gradients when clipping begins.

    The code path is ``expanded weights``; it has no sampler of its own to call.
    """
    clip_and_accumulate = optimizer.clip_and_accumulate

    def look_and_clip() -> None:
        for layer in module.modules():
            own = layer.parameters(recurse=False)
            if any(getattr(parameter, "grad_sample", None) is not None for parameter in own):
                watch(layer, "expanded weights", lambda: None, ())
        clip_and_accumulate()

    with ExitStack() as watching:
        _replace(watching, optimizer, "clip_and_accumulate", look_and_clip)
        yield
