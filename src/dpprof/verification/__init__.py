"""Proof that a method's clipped gradient is the reference's, and ``check`` for users' own loops."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dpprof.verification.training_check import Checked as Checked
    from dpprof.verification.training_check import check as check
    from dpprof.verification.training_loop import Mechanism as Mechanism
    from dpprof.verification.training_loop import WrongTrainingError as WrongTrainingError

_MODULES = {
    "Checked": "dpprof.verification.training_check",
    "Mechanism": "dpprof.verification.training_loop",
    "WrongTrainingError": "dpprof.verification.training_loop",
    "check": "dpprof.verification.training_check",
}
__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    """Import a public name at first use, so that this package alone loads no torch."""
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
