"""Proof that a method's clipped gradient is the reference's, and ``check`` for users' own loops."""

from typing import TYPE_CHECKING

from dpprof.system.imports import import_at_first_use

if TYPE_CHECKING:
    from dpprof.clipping.company import WrongTrainingError as WrongTrainingError
    from dpprof.verification.training.check import Checked as Checked
    from dpprof.verification.training.check import check as check
    from dpprof.verification.training.loop import Mechanism as Mechanism

_MODULES = {
    "Checked": "dpprof.verification.training.check",
    "Mechanism": "dpprof.verification.training.loop",
    "WrongTrainingError": "dpprof.clipping.company",
    "check": "dpprof.verification.training.check",
}
__all__ = list(_MODULES)
__getattr__ = import_at_first_use(__name__, _MODULES)
