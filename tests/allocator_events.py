"""What PyTorch's CPU allocator reports of one call."""

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def find_peak(run: Callable[[], Any]) -> int:
    """Return the most that a call holds beyond its results."""
    run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        found = run()
    live = most = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            most = max(most, live)
    results = found if isinstance(found, tuple | list) else (found,)
    return most - sum(one.nbytes for one in results if isinstance(one, torch.Tensor))
