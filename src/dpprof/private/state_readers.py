"""Tells who asks: what Lightning and accelerate get of a state, they write into checkpoints."""

import sys

LIGHTNING = ("lightning.", "lightning_fabric.", "pytorch_lightning.")
WRITERS = (*LIGHTNING, "accelerate.checkpointing.")
_PASSES_ON = "accelerate.optimizer"
"""To its own checkpoints, and to transformers' trainer, which keeps secrets apart itself."""


def is_asked_by(modules: tuple[str, ...]) -> bool:
    """Return whether a module with such a name called the function that calls this."""
    asking = sys._getframe(2)  # noqa: SLF001 (inspect reads files)
    if asking.f_globals.get("__name__") == _PASSES_ON and asking.f_back is not None:
        asking = asking.f_back
    return f"{asking.f_globals.get('__name__')}.".startswith(modules)
