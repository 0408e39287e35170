"""Captures functions as CUDA graphs that share one pool of memory.

PyTorch requires the following. Graphs that share a pool are replayed one after another
(``torch.cuda.graph``). A generator must be registered, or each replay draws the same numbers
(``CUDAGraph.register_generator_state``). Other threads may use the device during a capture only if
errors of capture are those of this thread. What a graph reads must stay: a replay reads addresses,
whatever lies there.
"""

import gc
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

Output = TypeVar("Output")


class CudaGraphs:
    """Captures functions of one CUDA device; ``list_generators`` lists others than its default."""

    def __init__(
        self, device: torch.device, list_generators: Callable[[], Iterable[torch.Generator]]
    ) -> None:
        self._default = torch.cuda.default_generators[torch.device(device).index or 0]
        self._list_generators = list_generators
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, function: Callable[[], object], undo: Callable[[], object]) -> None:
        """Run a function where it will be captured, twice, and ``undo`` that: kernels are tuned."""
        gc.collect()  # a caught error's traceback may keep the graph of an earlier batch
        present = torch.cuda.current_stream(self._stream.device)
        before = torch.cuda.get_sync_debug_mode()
        self._stream.wait_stream(present)
        with torch.cuda.stream(self._stream):
            for mode in (before, "error"):
                torch.cuda.set_sync_debug_mode(mode)
                try:
                    function()
                except RuntimeError as error:
                    if "synchroniz" not in str(error):
                        raise
                    raise RuntimeError(
                        f"the step waits for the device, so it cannot be a CUDA graph ({error}); "
                        "take out what reads numbers of tensors, or use the ordinary loop"
                    ) from error
                finally:
                    torch.cuda.set_sync_debug_mode(before)
                    undo()
        present.wait_stream(self._stream)

    def capture(self, function: Callable[[], Output]) -> tuple[Callable[[], None], Output]:
        """Return a function that runs a function's kernels again, and the output they then write.

        ``RuntimeError``: it does what no graph can. This process may then be unable to go on.
        """
        graph = torch.cuda.CUDAGraph()
        for generator in self._list_generators():
            if generator is not self._default:
                graph.register_generator_state(generator)
        present = torch.cuda.current_stream(self._stream.device)
        torch.clear_autocast_cache()  # a cast weight would be that of the capture for ever
        cause: BaseException | None = None
        try:
            with torch.cuda.graph(
                graph, self._pool, self._stream, capture_error_mode="thread_local"
            ):
                try:
                    output = function()
                except BaseException as error:
                    cause = error  # the end of the capture raises another one
                    raise
        except BaseException:
            torch.cuda.set_stream(present)  # which a failed capture leaves
            if cause is None:
                raise
            if "uncaptured work" in str(cause):
                raise RuntimeError(
                    f"the step cannot be captured ({cause}); this happens if something keeps an "
                    "earlier batch's losses with their graph: keep losses.detach()"
                ) from cause
            raise cause  # noqa: B904 (the other one is its consequence)
        finally:
            torch.clear_autocast_cache()
        # PyTorch sets what generators read in a replay on this stream, as a capture begins. Without
        # waiting, that may come after the first replay has set it: numbers would be drawn again.
        present.wait_stream(self._stream)
        return graph.replay, output


class _Inputs(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps the storages that operators use and that none of them made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.held: dict[int, Any] = {}
        self._made: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for storage in _storages((args, kwargs)):
            if storage._cdata not in self._made:  # noqa: SLF001 (it has no public name)
                self.held[storage._cdata] = storage  # noqa: SLF001
        out = func(*args, **(kwargs or {}))
        self._made.update(
            storage._cdata  # noqa: SLF001
            for storage in _storages(out)
            if storage._cdata not in self.held  # noqa: SLF001
        )
        return out


def _storages(values: Any) -> list[torch.UntypedStorage]:
    leaves = pytree.tree_leaves(values)
    return [leaf.untyped_storage() for leaf in leaves if isinstance(leaf, Tensor)]


@contextmanager
def holding_inputs() -> Iterator[list[Any]]:
    """Yield a list that gets, at the end of the context, the memory that the context read."""
    held: list[Any] = []
    inputs = _Inputs()
    with torch.autograd.set_multithreading_enabled(False), inputs:
        yield held
    held += inputs.held.values()


def make_capturable(optimizer: Optimizer) -> None:
    """Let an optimizer count its steps on the device, where it can."""
    for group in optimizer.param_groups:
        if "capturable" not in group:
            continue
        group["capturable"] = True
        for parameter in group["params"]:
            state = optimizer.state.get(parameter, {})
            if isinstance(state.get("step"), torch.Tensor):
                state["step"] = state["step"].to(parameter.device)
