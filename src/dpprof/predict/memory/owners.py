"""Finds the owner of a storage, and by which evidence.

Evidence by **identity** is the strongest: the storage was seen as a parameter, its ``.grad``, a
saved tensor and so on. Next is the **birthplace**: the sampler, function, autograd node or module
that allocated it. Evidence by **phase** alone is a guess, and is reported separately.
"""

from collections.abc import Mapping
from types import CodeType
from typing import NamedTuple

from dpprof.experiments.records.terms import Component, Evidence
from dpprof.predict.memory.events import Storage
from dpprof.subjects.methods.opacus.opacus_paths import OpacusPath

SAVED = "saved"
LOGITS = "logits"
BACKPROPS = "backprops"
DP_ACTIVATIONS = "dp_activations"
"""Roles that are not also names of components."""

_FIRST: tuple[Component, ...] = (
    "parameters",
    "quantization_scales",
    "inputs",
    "optimizer_state",
    "per_sample_gradients",
    "norm_samples",
    "summed_gradients",
    "gradients",
    "gram_matrices",
    "noise",
    "communication_buffers",
    "unsharded_parameters",
    "unsharded_gradients",
    "workspace",
)
"""Roles that decide the component alone, the strongest first."""

_THEN: dict[str, Component] = {
    LOGITS: "logits_and_loss",
    DP_ACTIVATIONS: "dp_activations",
    SAVED: "saved_activations",
    BACKPROPS: "output_gradients",
}
"""Other roles, and the component while autograd does not keep the storage."""

_PRODUCTS = ("mm", "bmm", "baddbmm", "addmm")


class Owner(NamedTuple):
    """A component, and the kind of evidence; None for what is unattributed."""

    component: Component
    evidence: Evidence | None


def find_owner(
    storage: Storage, births: Mapping[CodeType, Component], *, saved: bool, temporary: bool
) -> Owner:
    """Return the owner of a storage.

    ``births`` are components by the code of the function that allocates them. ``saved`` says
    whether autograd keeps the storage at that moment; ``temporary`` whether it was freed in the
    phase in which it was allocated.
    """
    declared = None if storage.code is None else births.get(storage.code)
    # The same code of bitsandbytes allocates what it multiplies the copy with, and the product.
    is_other = storage.op in _PRODUCTS or len(storage.shape) > 2  # noqa: PLR2004 (a matrix)
    if declared is not None and not (declared == "dequantized_weights" and is_other):
        return Owner(declared, "identity" if declared in storage.roles else "birthplace")
    roles = storage.roles
    component = next((component for component in _FIRST if component in roles), None)
    if saved and component is None:
        is_outside = LOGITS in roles or storage.module is None
        component = "logits_and_loss" if is_outside else "saved_activations"
    component = component or next((_THEN[role] for role in _THEN if role in roles), None)
    if component is not None:
        return Owner(component, "identity")
    component = _by_origin(storage, temporary=temporary)
    if component is not None:
        return Owner(component, "birthplace")
    guess = _by_phase(storage, temporary=temporary)
    return Owner(guess, "phase") if guess is not None else Owner("unattributed", None)


def _by_origin(storage: Storage, *, temporary: bool) -> Component | None:
    if storage.sampler is not None:
        shape = storage.shape
        is_square = len(shape) >= 3 and shape[-1] == shape[-2]  # noqa: PLR2004 (samples x T x T)
        finds_norms = storage.sampler is OpacusPath.NORM_SAMPLER and storage.op in _PRODUCTS
        return "gram_matrices" if finds_norms and is_square else "workspace"
    if storage.node is not None:
        return "output_gradients"
    if storage.phase == "forward" or storage.recomputed:
        if storage.module is None:
            return "logits_and_loss"
        if storage.recomputed:  # live until its backward, in the same phase
            return "saved_activations"
        return "workspace" if temporary else None
    return "workspace" if temporary and storage.function is not None else None


def _by_phase(storage: Storage, *, temporary: bool) -> Component | None:
    if storage.phase in ("backward", "second_backward"):
        return "output_gradients"
    if storage.phase == "forward":
        return "saved_activations"
    return "workspace" if temporary and storage.phase != "setup" else None
