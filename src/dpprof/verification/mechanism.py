"""Compares the mechanism that a method declares with its clipping groups."""

import math
from collections.abc import Sequence

from dpprof.methods.training_step import TrainingStep
from dpprof.records.verdict import TOLERANCE
from dpprof.spec.mechanisms import FLAT, NO_CLIPPING
from dpprof.verification.reference import Group


def find_sensitivity(groups: Sequence[Group], noise_bound: float) -> float | None:
    """Return how far one sample can move the sum, divided by the bound that scales the noise."""
    return math.hypot(*(group.bound for group in groups)) / noise_bound if groups else None


def complain_of_mechanism(
    method: type[TrainingStep], groups: Sequence[Group], noise_bound: float
) -> str | None:
    """Return how a step's groups contradict the method's declarations; None if they do not."""
    name, declared = method.mechanism, method.sensitivity
    found = find_sensitivity(groups, noise_bound)
    if found is None:
        return None if name == NO_CLIPPING else f"it declares {name}, and clips nothing"
    if name == NO_CLIPPING:
        return "it clips, and declares no mechanism"
    if name == FLAT and len(groups) > 1:
        return f"it declares {FLAT}, and clips {len(groups)} groups"
    told = name != FLAT and "sensitivity" in (method.__doc__ or "").lower()
    if declared > 1 and not told:
        return (
            f"it declares a sensitivity of {declared:g}, which takes a mechanism of another name "
            "and a docstring that states the sensitivity"
        )
    if not found <= declared * (1 + TOLERANCE):
        return f"one sample can move the sum by {found:.2f} C, and it declares {declared:g} C"
    return None
