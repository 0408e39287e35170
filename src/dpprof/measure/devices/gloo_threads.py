"""Keeps the release of exchanged tensors on the thread that recorders follow.

gloo works on threads of its own, which drop their references to a collective's tensors some moments
after it has ended. If the last reference is dropped there, a tensor is freed later than its step
says, and the profiler, which follows one thread, counts its bytes for ever.
"""

import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import distributed
from torch.utils._python_dispatch import TorchDispatchMode

_THREAD = "pt_gloo_runloop"
_POLL_S = 1e-5
_PATIENCE_S = 1.0


def settled_collectives() -> AbstractContextManager[Any]:
    """Settle the collectives within, where there are ranks that gloo connects."""
    is_gloo = distributed.is_initialized() and distributed.get_backend() == distributed.Backend.GLOO
    return _SettledCollectives() if is_gloo else nullcontext()  # type: ignore[no-untyped-call]


class _SettledCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets each collective within return when gloo's threads have finished with its tensors."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator; after a collective, wait for its work and then for the threads."""
        if any(kind.__name__ == "DTensor" for kind in types):
            return NotImplemented  # it calls operators on its shard, which come back here
        out = func(*args, **(kwargs or {}))
        if func.namespace == "c10d":
            for part in out if isinstance(out, tuple) else (out,):
                if isinstance(part, torch.ScriptObject):  # the work, which still holds the tensors
                    part.wait()  # type: ignore[attr-defined]
            _wait_for_threads()
        return out


def _wait_for_threads() -> None:
    """Wait until all of gloo's threads sleep: they do when they have dropped their last work."""
    end = time.monotonic() + _PATIENCE_S
    while any(map(_runs, Path("/proc/self/task").glob("*/stat"))) and time.monotonic() < end:
        time.sleep(_POLL_S)


def _runs(stat: Path) -> bool:
    """Return whether the thread of a ``stat`` file (proc(5)) is one of gloo's, and not asleep."""
    name, _, rest = stat.read_text().partition("(")[2].rpartition(")")
    return name == _THREAD and rest.split()[0] != "S"
