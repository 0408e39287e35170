"""CUDA graphs of functions that share one pool of memory.

What PyTorch requires, and where it says so: one pool for graphs that are replayed one after
another (``torch.cuda.graph``); a generator must be registered, or each replay draws the same
numbers (``CUDAGraph.register_generator_state``); other threads may use the device meanwhile only if
errors of capture are those of this thread.
"""

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch.optim import Optimizer

Output = TypeVar("Output")


class CudaGraphs:
    """Captures functions of one device.

    Args:
        device: A CUDA device.
        generators: All that the functions draw from, but for the device's default one.
    """

    def __init__(self, device: torch.device, generators: Iterable[torch.Generator]) -> None:
        default = torch.cuda.default_generators[torch.device(device).index or 0]
        self._generators = [one for one in generators if one is not default]
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def warm_up(self, function: Callable[[], object]) -> None:
        """Run a function where it will be captured, so that libraries have what they need."""
        present = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(present)
        with torch.cuda.stream(self._stream):
            function()
        present.wait_stream(self._stream)

    def capture(self, function: Callable[[], Output]) -> tuple[Callable[[], None], Output]:
        """Return what runs a function's kernels again, and the output that they then write.

        Raises:
            RuntimeError: The function waits for the device, or does what no graph can.
        """
        graph = torch.cuda.CUDAGraph()
        for generator in self._generators:
            graph.register_generator_state(generator)
        torch.clear_autocast_cache()  # a cast weight would be that of the capture for ever
        try:
            with torch.cuda.graph(
                graph, self._pool, self._stream, capture_error_mode="thread_local"
            ):
                output = function()
        except RuntimeError as error:
            if "captur" not in str(error):
                raise
            raise RuntimeError(
                f"the step cannot be captured as a CUDA graph ({error}); it waits for the device, "
                "or reads numbers of it: take that out, or run steps in the ordinary way"
            ) from error
        finally:
            torch.clear_autocast_cache()
        return graph.replay, output


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
