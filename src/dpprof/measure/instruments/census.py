"""Bytes by component at a moment: storages of tensors that are known by identity."""

from typing import TYPE_CHECKING

from dpprof.experiments.records.terms import Component
from dpprof.private.contributions.sums import own_part
from dpprof.subjects.methods.tensors import tensors_in
from dpprof.subjects.setup import TensorHolders

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

_OF_PARAMETERS: tuple[Component, ...] = (
    "gradients",
    "per_sample_gradients",
    "norm_samples",
    "summed_gradients",
)
"""Components that a method may keep for a parameter."""


def take_census(holders: TensorHolders) -> dict[str, int]:
    """Count the bytes of every component that is known by identity.

    Allocates no tensor, so it does not change a peak.

    Returns:
        Bytes of ``inputs``, ``parameters`` (buffers included), ``gradients``,
        ``optimizer_state``, ``per_sample_gradients``, ``norm_samples``,
        ``summed_gradients`` and ``dp_activations`` (what Opacus's hooks keep of the forward
        pass, which autograd may hold too). A storage counts once, whole, for the first of
        these that it belongs to, and only on the device of the parameters. Of a sharded tensor,
        this rank's shard counts.
    """
    parameters = list(holders.module.parameters())
    groups: dict[str, Iterable[Tensor]] = {
        "inputs": holders.batch or (),
        "parameters": [*parameters, *holders.module.buffers()],
    }
    held = [("gradients", parameter.grad) for parameter in parameters]
    held += [pair for parameter in parameters for pair in holders.held_for(parameter)]
    for kept in _OF_PARAMETERS:
        groups[kept] = tensors_in([each for component, each in held if component == kept])
    state = holders.optimizer.state if holders.optimizer else {}
    groups["optimizer_state"] = tensors_in([list(of_one.values()) for of_one in state.values()])
    layers = holders.module.modules()
    groups["dp_activations"] = tensors_in([vars(layer).get("activations") for layer in layers])
    device = parameters[0].device
    seen: set[int] = set()
    census = dict.fromkeys(groups, 0)
    for component, tensors in groups.items():
        for tensor in map(own_part, tensors):
            storage = tensor.untyped_storage()
            if tensor.device == device and storage.data_ptr() not in seen:
                seen.add(storage.data_ptr())
                census[component] += storage.nbytes()
    return census
