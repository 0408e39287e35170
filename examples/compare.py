"""What a step of each method takes, on one batch of an example."""

import copy
import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from dpprof.private import BookKeeping, FlashClipping

REPEATS = 5


def compare_methods(
    model: nn.Module, losses_of: Callable[..., Tensor], batch: tuple[Tensor, ...]
) -> None:
    """Time forward and backward, plain and clipped, in turn on copies; print the medians."""
    plain, flash_bk, flash = (copy.deepcopy(model) for _ in range(3))
    clippings = {"flash-bk": BookKeeping(flash_bk, 1.0), "flash": FlashClipping(flash, 1.0)}
    ways: dict[str, Callable[[], object]] = {
        "plain": lambda: losses_of(plain, *batch).mean().backward(),
        "flash-bk": lambda: clippings["flash-bk"].backward(losses_of(flash_bk, *batch)),
        "flash": lambda: clippings["flash"].backward(losses_of(flash, *batch)),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(REPEATS + 1):
        for (name, run), one in zip(ways.items(), (plain, flash_bk, flash), strict=True):
            one.zero_grad()
            start = time.perf_counter()
            run()
            if batch[0].is_cuda:
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - start)
    medians = {name: sorted(times[1:])[REPEATS // 2] for name, times in seconds.items()}
    for name, median in medians.items():
        ratio = median / medians["plain"]
        print(f"{name:>8}: {1000 * median:7.1f} ms, {ratio:.2f} times plain training")
