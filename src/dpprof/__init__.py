"""Where the memory, time, FLOPs and bytes of differentially private training go."""

from typing import TYPE_CHECKING

from dpprof.system.imports import import_at_first_use

if TYPE_CHECKING:
    from dpprof.answers.advise import advise as advise
    from dpprof.answers.budget import budget as budget
    from dpprof.answers.capacity import capacity as capacity
    from dpprof.answers.estimate import estimate as estimate
    from dpprof.answers.explain import explain as explain
    from dpprof.answers.verify import verify as verify

__all__ = ["advise", "budget", "capacity", "estimate", "explain", "verify"]
__getattr__ = import_at_first_use(__name__, {one: f"{__name__}.answers.{one}" for one in __all__})
