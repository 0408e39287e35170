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

Paths = dict[str, str]
"""From a layer's type to ``norm sampler``, ``grad sampler``, ``functorch`` or
``expanded weights``; several, joined by commas, where layers of a type differ."""

Sampler = Callable[..., Any]


def _note(paths: Paths, layer: nn.Module, path: str) -> None:
    kind = type(layer).__name__
    known = [text for text in paths.get(kind, "").split(", ") if text]
    paths[kind] = ", ".join(sorted({*known, path}))


def _replace(watching: ExitStack, owner: object, name: str, value: object) -> None:
    """Set an attribute of this one object until the watch is over."""
    own = vars(owner)
    if name in own:
        watching.callback(setattr, owner, name, own[name])
    else:
        watching.callback(delattr, owner, name)
    setattr(owner, name, value)


@contextmanager
def watch_hooks(module: GradSampleHooks) -> Iterator[Paths]:
    """Watch a model with Opacus's hooks; the paths are filled in as layers take them.

    A norm sampler finds norms without per-sample gradients, a grad sampler is Opacus's
    rule for a layer's per-sample gradients, functorch is what is left.
    """
    paths: Paths = {}

    def noting(path: str, sampler: Sampler) -> Sampler:
        def sample(layer: nn.Module, *inputs: Any) -> Any:
            _note(paths, layer, path)
            return sampler(layer, *inputs)

        return sample

    def noting_functorch(layer: nn.Module, sampler: Sampler) -> Sampler:
        def sample(*inputs: Any) -> Any:
            _note(paths, layer, "functorch")
            return sampler(*inputs)

        return sample

    with ExitStack() as watching:
        for table, path in (("GRAD_SAMPLERS", "grad sampler"), ("NORM_SAMPLERS", "norm sampler")):
            samplers = getattr(type(module), table, {})
            noted = {kind: noting(path, sampler) for kind, sampler in samplers.items()}
            _replace(watching, module, table, noted)
        for layer in module.modules():
            own = vars(layer).get("ft_compute_sample_grad")
            if own is not None:
                _replace(watching, layer, "ft_compute_sample_grad", noting_functorch(layer, own))
        yield paths


@contextmanager
def watch_expanded_weights(module: nn.Module, optimizer: DPOptimizer) -> Iterator[Paths]:
    """Watch a model with expanded weights: who has per-sample gradients when clipping begins."""
    paths: Paths = {}
    clip_and_accumulate = optimizer.clip_and_accumulate

    def look_and_clip() -> None:
        for layer in module.modules():
            own = layer.parameters(recurse=False)
            if any(getattr(parameter, "grad_sample", None) is not None for parameter in own):
                _note(paths, layer, "expanded weights")
        clip_and_accumulate()

    with ExitStack() as watching:
        _replace(watching, optimizer, "clip_and_accumulate", look_and_clip)
        yield paths
