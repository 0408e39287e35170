"""Where the memory, time, FLOPs and bytes of differentially private training go."""

from typing import TYPE_CHECKING

from dpprof.system.imports import import_at_first_use

if TYPE_CHECKING:
    from dpprof.answers.advise import advise as advise
    from dpprof.answers.budget import budget as budget
    from dpprof.answers.capacity import capacity as capacity
    from dpprof.answers.estimate import estimate as estimate
    from dpprof.answers.explain import explain as explain
    from dpprof.answers.fits import fits as fits
    from dpprof.answers.predictions import PredictionError as PredictionError
    from dpprof.answers.verify import verify as verify
    from dpprof.spec.validation import InputError as InputError

_MODULES = {
    "InputError": "dpprof.spec.validation",
    "PredictionError": "dpprof.answers.predictions",
    "advise": "dpprof.answers.advise",
    "budget": "dpprof.answers.budget",
    "capacity": "dpprof.answers.capacity",
    "estimate": "dpprof.answers.estimate",
    "explain": "dpprof.answers.explain",
    "fits": "dpprof.answers.fits",
    "verify": "dpprof.answers.verify",
}
__all__ = list(_MODULES)
__getattr__ = import_at_first_use(__name__, _MODULES)
