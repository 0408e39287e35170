"""Ceilings of a checkout in which nothing is measured: they are invented."""

from dpprof.experiments.records.ceilings import Limits

_REPEATED = {"seconds": 2.0, "median_s": 2.0, "repeats": 1}
_PRODUCT = {"flops_per_s": 1000.0, "size": 10, "samples": [_REPEATED | {"size": 10}]}
_COPIES = {"bytes_per_s": 8.0, "array_bytes": 8, "samples": [_REPEATED | {"array_bytes": 8}]}


def measure(name):
    product = _PRODUCT | {"stopped": None}
    return Limits.model_validate(
        {
            "matmul": {"float32": product, "tf32": None, "bfloat16": product, "float64": product},
            "bandwidth": _COPIES | {"stopped": None},
            "launch_latency_s": 1e-6,
            "reasons": {"matmul.tf32": f"invented for {name}"},
        }
    )
