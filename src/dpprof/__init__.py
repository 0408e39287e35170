"""Where the memory, time, FLOPs and bytes of differentially private training go."""

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from dpprof.private.lazy_imports import import_at_first_use

if TYPE_CHECKING:
    from dpprof.ask.advise import advise as advise
    from dpprof.ask.budget import budget as budget
    from dpprof.ask.capacity import capacity as capacity
    from dpprof.ask.estimate import estimate as estimate
    from dpprof.ask.explain import explain as explain
    from dpprof.ask.fits import fits as fits
    from dpprof.ask.predictions import PredictionError as PredictionError
    from dpprof.ask.verify import verify as verify
    from dpprof.experiments.config.validation import InputError as InputError

_MODULES = {
    "InputError": "dpprof.experiments.config.validation",
    "PredictionError": "dpprof.ask.predictions",
    "advise": "dpprof.ask.advise",
    "budget": "dpprof.ask.budget",
    "capacity": "dpprof.ask.capacity",
    "estimate": "dpprof.ask.estimate",
    "explain": "dpprof.ask.explain",
    "fits": "dpprof.ask.fits",
    "verify": "dpprof.ask.verify",
}
__all__ = list(_MODULES)
_find = import_at_first_use(__name__, _MODULES)


def __getattr__(name: str) -> Any:
    """Return a public name, which is loaded at first use, or ``__version__``, as installed."""
    return version("dpprof") if name == "__version__" else _find(name)
