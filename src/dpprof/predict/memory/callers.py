"""Which function, which module and which sampler runs as a tensor is allocated."""

import sys
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

from dpprof.predict.flops.cost import EINSUMS, Scope
from dpprof.private.allocation_marks import HELPERS
from dpprof.private.norms.code_paths import CodePath, finds_norms

_next_sequence_nr = torch._C._autograd._get_sequence_nr  # noqa: SLF001 (no public name)
_current_node = torch._C._current_autograd_node  # noqa: SLF001
_TORCH = str(Path(torch.__file__).parent)
_OWN = str(Path(__file__).parent)
_NAMED_IN_TORCH = ("/optim/", "/_expanded_weights/", "/nn/parallel/")
"""Parts of torch whose functions are named; all other functions of torch are skipped."""

_EINSUMS = {getattr(torch.functional, name).__code__ for name in EINSUMS}
_OF_EINSUMS = frozenset({"bmm", "mm", "mul", "sum", "clone"})
"""The operators that einsum calls. Only for these is the stack searched, which is slow."""


class Callers:
    """Finds who calls an operator, now."""

    def __init__(self) -> None:
        self.modules: list[str | None] = []
        """Names of the modules whose forward is running, innermost last."""

        self.sampler: tuple[CodePath, str] | None = None
        """Path and layer of the sampler that is running; its caller sets it."""

        self._module_of_node: dict[int, str | None] = {}
        self._names: dict[CodeType, str | None] = {}

    def note_node(self) -> None:
        """Remember which module's forward has made the last node of autograd's graph."""
        if self.modules and (_current_node() is None or self.modules[-1] is not None):
            self._module_of_node[_next_sequence_nr() - 1] = self.modules[-1]

    def is_recomputing(self, node: Any) -> bool:
        """Return whether backward runs a module's forward a second time, as checkpointing does."""
        return node is not None and bool(self.modules) and self.modules[-1] is not None

    def module(self) -> str | None:
        """Return the name of the module whose forward or backward is running."""
        node = _current_node()
        if node is not None and not self.is_recomputing(node):
            return self._module_of_node.get(node._sequence_nr())  # noqa: SLF001
        return self.modules[-1] if self.modules else None

    def scope(self, op: str) -> Scope | None:
        """Return the caller, where the op kind depends on it."""
        if self.sampler is not None and finds_norms(self.sampler[0]):
            return "norm"
        if op not in _OF_EINSUMS:
            return None
        frame: FrameType | None = sys._getframe(2)  # noqa: SLF001 (the documented way to the stack)
        while frame is not None:
            if frame.f_code in _EINSUMS:
                return "einsum"
            frame = frame.f_back
        return None

    def function(self) -> tuple[CodeType, str, int] | tuple[None, None, int]:
        """Return code, name and instruction of the innermost function that ``_name`` names."""
        frame = sys._getframe(2)  # noqa: SLF001 (the documented way to the stack)
        while frame is not None:
            code = frame.f_code
            if code not in self._names:
                self._names[code] = _name(code, frame.f_globals.get("__name__", ""))
            name = self._names[code]
            if name is not None:
                return code, name, frame.f_lasti
            frame = frame.f_back  # type: ignore[assignment]
        return None, None, 0


def _name(code: CodeType, module: str) -> str | None:
    """Return ``module:function``; None for the recorder, helpers, and most of torch."""
    file = code.co_filename
    is_skipped = (
        code in HELPERS
        or file.startswith((_OWN, "<"))
        or (file.startswith(_TORCH) and not any(part in file for part in _NAMED_IN_TORCH))
    )
    # Comprehensions and nested functions count as the function that contains them.
    return None if is_skipped else f"{module}:{code.co_qualname.partition('.<locals>')[0]}"
