"""What Python does in a step beside starting kernels: it reads answers, and draws numbers.

A model that asks ``mask.all()`` to choose a kernel waits for the device, which no graph can. So the
answer is kept, and each replay compares it on the device with its own. A batch with another answer
runs as an ordinary loop.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from dpprof.private.samples.random_state import OtherGenerators
from dpprof.private.substitutes import substitute

_READS = {Tensor.__bool__, Tensor.__int__, Tensor.__index__, Tensor.item}


class Reads:
    """The answers that one function reads from a device; it does the same in each of its runs.

    Only booleans and whole numbers are kept: real numbers differ in each batch, so a function that
    reads some waits for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._answers: list[bool | int] | None = None
        self._differ: list[Tensor] = []

    @contextmanager
    def kept(self) -> Iterator[None]:
        """Keep the answers of a function's first run for later ones, which may not read more."""
        mode = _Keeping(self._device, self._answers)
        with _as_if_not_captured(), mode:
            yield
        self._answers = mode.answers
        self._differ += mode.differ

    def differ(self) -> Tensor:
        """Tell whether any answer since the last call is another one; a bool tensor, no axes."""
        flags, self._differ = self._differ, []
        if not flags:
            return torch.zeros((), dtype=torch.bool, device=self._device)
        return torch.stack(flags).any()


class _Keeping(TorchFunctionMode):
    """Keeps answers, or gives those that are there."""

    def __init__(self, device: torch.device, answers: list[bool | int] | None) -> None:
        super().__init__()
        self.answers = [] if answers is None else answers
        self.differ: list[Tensor] = []
        self._device = device
        self._coming = None if answers is None else iter(answers)

    def __torch_function__(
        self, function: Callable[..., Any], _: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        is_truth = function is Tensor.__bool__
        is_kept = function in _READS and args[0].device == self._device
        if not is_kept or (not is_truth and args[0].dtype.is_floating_point):
            return function(*args, **(kwargs or {}))
        if self._coming is None:
            self.answers.append(function(*args))
            return self.answers[-1]
        answer = next(self._coming, None)
        if answer is None:
            raise RuntimeError("the step reads other numbers of tensors than in its first run")
        read = args[0].detach().reshape(())
        self.differ.append((read.bool() if is_truth else read) != answer)
        return answer


@contextmanager
def refusing_draws_on_host(others: OtherGenerators, *, is_cuda: bool) -> Iterator[None]:
    """Refuse what draws numbers on the host (``RuntimeError``): each replay would repeat them.

    A generator of NumPy or Python that the step itself makes is not seen. ``is_cuda`` tells
    whether PyTorch's default generator is the host's, and not the step's.
    """

    def read() -> tuple[list[bytes], bytes]:
        return others.read(), torch.get_rng_state().numpy().tobytes() if is_cuda else b""

    before, draws = read(), _DrawsOnCpu()  # type: ignore[no-untyped-call]
    with draws if is_cuda else nullcontext():
        yield
    if read() != before or draws.are_seen:
        raise RuntimeError(
            "the step draws random numbers on the host, and a graph would repeat them; draw them "
            "on the device, or use the ordinary loop"
        )


class _DrawsOnCpu(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees operators that draw on the CPU, from any generator."""

    are_seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded in func.tags and isinstance(out, Tensor):
            self.are_seen |= out.is_cpu
        return out


def _as_if_not_captured() -> AbstractContextManager[None]:
    """Let transformers choose masks during a capture as in an ordinary run."""
    module = sys.modules.get("transformers.utils.import_utils")
    if not hasattr(module, "is_cuda_stream_capturing"):
        return nullcontext()
    return substitute(module, "is_cuda_stream_capturing", lambda: False)
