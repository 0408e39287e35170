"""The table ``ceilings``: what each device can do at most, measured and by its data sheet."""

from collections.abc import Iterable, Iterator
from typing import Any

import pandas as pd

from dpprof.analysis.frames import make_frame
from dpprof.records.ceilings import Ceilings, device_name
from dpprof.spec.datasheets import find_by_device_name


def tabulate_ceilings(known: Iterable[Ceilings]) -> pd.DataFrame:
    """Return one row per device and figure.

    The figures are ``flops_per_s`` of each dtype (``size`` is the n of n x n matrices),
    ``bytes_per_s`` (``size`` is the bytes of the copied array) and ``launch_s``. A figure that was
    not measured has a ``reason``. ``source`` names the data sheet.
    """
    rows = [row for ceilings in known for row in _rows(ceilings)]
    return make_frame("ceilings", rows).astype({"size": "Int64"})


def _rows(ceilings: Ceilings) -> Iterator[dict[str, Any]]:
    measured = {
        "device": device_name(ceilings.device),
        "others_busy_cores": ceilings.others_busy_cores,
    }
    sheet = find_by_device_name(ceilings.device.get("name"))
    common = measured | {"source": sheet and sheet.source}
    for dtype, product in ceilings.matmul.items():
        yield common | {
            "dtype": dtype,
            "figure": "flops_per_s",
            "measured": product and product.flops_per_s,
            "size": product and product.size,
            "datasheet": sheet and sheet.flops_per_s.get(dtype),
            "reason": ceilings.reasons.get(f"matmul.{dtype}"),
        }
    copies = ceilings.bandwidth
    yield common | {
        "figure": "bytes_per_s",
        "measured": copies and copies.bytes_per_s,
        "size": copies and copies.array_bytes,
        "datasheet": sheet and sheet.bandwidth_bytes_per_s,
        "reason": ceilings.reasons.get("bandwidth"),
    }
    yield measured | {
        "figure": "launch_s",
        "measured": ceilings.launch_latency_s,
        "reason": ceilings.reasons.get("launch_latency_s"),
    }
