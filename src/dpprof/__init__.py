"""Where the memory, time, FLOPs and bytes of differentially private training go."""

from typing import TYPE_CHECKING

from dpprof.private.lazy_imports import import_at_first_use

if TYPE_CHECKING:
    from dpprof.ask.advise.ask import advise as advise
    from dpprof.ask.budget.ask import budget as budget
    from dpprof.ask.capacity.ask import capacity as capacity
    from dpprof.ask.estimate.ask import estimate as estimate
    from dpprof.ask.explain.ask import explain as explain
    from dpprof.ask.fits.ask import fits as fits
    from dpprof.ask.predictions import PredictionError as PredictionError
    from dpprof.ask.verify.ask import verify as verify
    from dpprof.experiments.config.validation import InputError as InputError

_MODULES = {
    "InputError": "dpprof.experiments.config.validation",
    "PredictionError": "dpprof.ask.predictions",
    "advise": "dpprof.ask.advise.ask",
    "budget": "dpprof.ask.budget.ask",
    "capacity": "dpprof.ask.capacity.ask",
    "estimate": "dpprof.ask.estimate.ask",
    "explain": "dpprof.ask.explain.ask",
    "fits": "dpprof.ask.fits.ask",
    "verify": "dpprof.ask.verify.ask",
}
__all__ = list(_MODULES)
__getattr__ = import_at_first_use(__name__, _MODULES)
