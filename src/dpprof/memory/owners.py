"""Who owns a storage, and how well that is known.

Evidence by **identity** is best: the storage was seen as a parameter, its ``.grad``, a saved
tensor ... Next is its **birthplace**: the sampler, the function, or the autograd node or
module that was under way when it was born. Evidence by **phase** alone is a guess, and is
told apart so that nobody mistakes it for knowledge.
"""

from collections.abc import Mapping
from types import CodeType
from typing import NamedTuple

from dpprof.memory.recorder import Storage
from dpprof.methods.opacus.paths import OpacusPath
from dpprof.records.result import Component, Evidence

SAVED = "saved"
LOGITS = "logits"
BACKPROPS = "backprops"
DP_ACTIVATIONS = "dp_activations"
"""Roles that are no component as such, beside those that are called like one."""

_FIRST: tuple[Component, ...] = (
    "parameters",
    "inputs",
    "optimizer_state",
    "per_sample_gradients",
    "norm_samples",
    "summed_gradients",
    "gradients",
    "gram_matrices",
    "noise",
    "workspace",
)
"""Roles by which a storage belongs to a component at once, the strongest first."""

_THEN: tuple[tuple[str, Component], ...] = (
    (LOGITS, "logits_and_loss"),
    (DP_ACTIVATIONS, "dp_activations"),
    (SAVED, "saved_activations"),
    (BACKPROPS, "output_gradients"),
)
"""Other roles, and to whom a storage belongs while autograd does not keep it."""

_PRODUCTS = ("mm", "bmm", "baddbmm")


class Owner(NamedTuple):
    """A component, and on what kind of evidence; None for what is unattributed."""

    component: Component
    evidence: Evidence | None


def find_owner(
    storage: Storage, births: Mapping[CodeType, Component], *, saved: bool, transient: bool
) -> Owner:
    """Say who owns a storage.

    Args:
        storage: What is known of it.
        births: Components by the code of the function in which they are born.
        saved: Whether autograd keeps it for backward just then.
        transient: Whether it died in the phase in which it was born.
    """
    declared = None if storage.code is None else births.get(storage.code)
    if declared is not None:
        return Owner(declared, "identity" if declared in storage.roles else "birthplace")
    seen_as = _by_identity(storage.roles, storage.module, saved=saved)
    if seen_as is not None:
        return Owner(seen_as, "identity")
    born_as = _by_birthplace(storage, transient=transient)
    if born_as is not None:
        return Owner(born_as, "birthplace")
    guess = _by_phase(storage, transient=transient)
    return Owner(guess, "phase") if guess is not None else Owner("unattributed", None)


def _by_identity(roles: set[str], module: str | None, *, saved: bool) -> Component | None:
    if not roles and not saved:
        return None
    for component in _FIRST:
        if component in roles:
            return component
    if saved:
        return "logits_and_loss" if LOGITS in roles or module is None else "saved_activations"
    return next((component for role, component in _THEN if role in roles), None)


def _by_birthplace(storage: Storage, *, transient: bool) -> Component | None:
    if storage.sampler is not None:
        return "gram_matrices" if _is_gram(storage) else "workspace"
    if storage.node is not None:
        return "output_gradients"
    if storage.phase == "forward" or storage.again:
        if storage.module is None:
            return "logits_and_loss"
        if storage.again:  # it lives until its backward, in the same phase
            return "saved_activations"
        return "workspace" if transient else None
    return "workspace" if transient and storage.function is not None else None


def _is_gram(storage: Storage) -> bool:
    shape = storage.shape
    square = len(shape) >= 3 and shape[-1] == shape[-2]  # noqa: PLR2004 (samples x T x T)
    return storage.sampler is OpacusPath.NORM_SAMPLER and storage.op in _PRODUCTS and square


def _by_phase(storage: Storage, *, transient: bool) -> Component | None:
    if storage.phase in ("backward", "second_backward"):
        return "output_gradients"
    if storage.phase == "forward":
        return "saved_activations"
    return "workspace" if transient and storage.phase != "setup" else None
