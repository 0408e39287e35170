"""Where the memory, time, FLOPs and bytes of differentially private training go."""

from typing import TYPE_CHECKING

from dpprof.private.lazy_imports import import_at_first_use

if TYPE_CHECKING:
    from dpprof.ask.answers.advise import advise as advise
    from dpprof.ask.answers.budget import budget as budget
    from dpprof.ask.answers.capacity import capacity as capacity
    from dpprof.ask.answers.estimate import estimate as estimate
    from dpprof.ask.answers.explain import explain as explain
    from dpprof.ask.answers.fits import fits as fits
    from dpprof.ask.answers.predictions import PredictionError as PredictionError
    from dpprof.ask.answers.verify import verify as verify
    from dpprof.experiments.config.validation import InputError as InputError

_MODULES = {
    "InputError": "dpprof.experiments.config.validation",
    "PredictionError": "dpprof.ask.answers.predictions",
    "advise": "dpprof.ask.answers.advise",
    "budget": "dpprof.ask.answers.budget",
    "capacity": "dpprof.ask.answers.capacity",
    "estimate": "dpprof.ask.answers.estimate",
    "explain": "dpprof.ask.answers.explain",
    "fits": "dpprof.ask.answers.fits",
    "verify": "dpprof.ask.answers.verify",
}
__all__ = list(_MODULES)
__getattr__ = import_at_first_use(__name__, _MODULES)
