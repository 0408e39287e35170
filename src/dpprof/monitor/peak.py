"""The peak FLOP/s of this process's device, if it is known."""

import torch

from dpprof.monitor.metrics import Figure
from dpprof.spec.datasheets import find_by_device_name
from dpprof.spec.target import Dtype


def find_peak(dtype: Dtype | None) -> Figure:
    """Look up the current CUDA device in the data sheets; dense FLOP/s.

    Args:
        dtype: Dtype of matrix products. There is no default, as the peaks of a device differ by up
            to fifteen times.
    """
    missing = "peak_flops_per_s was not given, and "
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return Figure(None, missing + "a CPU has no data sheet")
    name = torch.cuda.get_device_name()
    target = find_by_device_name(name)
    if target is None:
        return Figure(None, missing + f"there is no data sheet of {name}")
    if dtype is None:
        return Figure(None, missing + "neither was dtype")
    peak = target.flops_per_s.get(dtype)
    return Figure(peak, "" if peak else missing + f"the data sheet of {name} lacks {dtype}")
