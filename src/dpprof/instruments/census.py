"""Who owns which bytes just now: tensors counted by identity, storage by storage."""

from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.optim import Optimizer

from dpprof.methods.base import Batch

_BY_ATTRIBUTE = {
    "gradients": ("grad",),
    "per_sample_gradients": ("grad_sample", "_current_grad_sample"),
    "norm_samples": ("_norm_sample",),
    "summed_gradients": ("summed_grad",),
}
"""Where Opacus and PyTorch keep what belongs to a parameter."""


class Holdings(NamedTuple):
    """What is known to hold tensors at a moment."""

    module: nn.Module
    optimizer: Optimizer | None = None
    batch: Batch | None = None


def take_census(holdings: Holdings) -> dict[str, int]:
    """Count the bytes of every component that can be told by identity.

    Allocates no tensor, so that taking it changes no peak.

    Returns:
        Bytes of ``inputs``, ``parameters`` (buffers included), ``gradients``,
        ``optimizer_state``, ``per_sample_gradients``, ``norm_samples``,
        ``summed_gradients`` and ``dp_activations`` (what Opacus's hooks keep of the forward
        pass, which autograd may hold too). A storage counts once, whole, for the first of
        these that it belongs to, and only on the device of the parameters.
    """
    parameters = list(holdings.module.parameters())
    groups: dict[str, Iterable[Tensor]] = {
        "inputs": holdings.batch or (),
        "parameters": [*parameters, *holdings.module.buffers()],
    }
    for component, names in _BY_ATTRIBUTE.items():
        groups[component] = _tensors([getattr(p, name, None) for p in parameters for name in names])
    state = holdings.optimizer.state if holdings.optimizer else {}
    groups["optimizer_state"] = _tensors([list(of_one.values()) for of_one in state.values()])
    layers = holdings.module.modules()
    groups["dp_activations"] = _tensors([vars(layer).get("activations") for layer in layers])
    device = parameters[0].device
    seen: set[int] = set()
    census = dict.fromkeys(groups, 0)
    for component, tensors in groups.items():
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.device == device and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                census[component] += storage.nbytes()
    return census


def _tensors(tree: Any) -> Iterator[Tensor]:
    """Find the tensors in nested lists and tuples."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, list | tuple):
        for branch in tree:
            yield from _tensors(branch)
