"""Derive the table of collectives' times that is part of dpprof, and say how exact it is.

The measurements are those of NVIDIA's aiconfigurator-core (PyPI, Apache-2.0), which timed NCCL
inside a node. The derived table keeps the median of all releases of NCCL, and of elements of one
and of two bytes, by size. Each size is held out, and predicted from the others, which are
then four times apart, and twice in use. Their errors are the spread of what is interpolated.
Times between nodes are computed (``dpprof.predict.step_time.collective_time``), and compared
with what others measured.

    pip install aiconfigurator-core pyarrow
    python perf/collective_tables.py --output perf/collective_tables.md
"""

import json
import math
import statistics
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from dpprof.experiments.config import datasheets
from dpprof.experiments.config.parallel import Parallel
from dpprof.predict.memory.exchanges import Collective, bytes_each_way
from dpprof.predict.step_time.collective_time import TABLE, CollectiveModel, interpolate_s
from product_tables import DEVICES, SOURCE, TABLES, find_spread, find_systems
from script import lay_out, make_parser, publish

NAMES = {"all_gather": "all-gather", "reduce_scatter": "reduce-scatter"}
NAMES |= {"all_reduce": "all-reduce", "alltoall": "all-to-all"}
MEASURED = Path(__file__).with_name("collectives_between_nodes.yaml")
LARGE = 2**20


def read_measured(device: str) -> "pd.Series[float]":
    """Return the median seconds by collective, ranks and bytes of the whole tensor."""
    folder = find_systems() / "data" / device / "comm" / "nccl"
    paths = (release / "nccl_perf.parquet" for release in folder.iterdir())
    calls = pd.concat(map(pd.read_parquet, paths))
    wide = np.where(calls["nccl_dtype"] == "half", 2, 1)
    calls = calls.assign(bytes=calls["message_size"] * wide, op_name=calls["op_name"].map(NAMES))
    return calls.groupby(["op_name", "num_gpus", "bytes"])["latency"].median() / 1e3


def derive() -> dict[str, Any]:
    """Return the content of the table's file, without its spread."""
    measured = {name: read_measured(device) for name, (device, _) in DEVICES.items()}
    sizes = sorted(
        set.intersection(*(set(s.index.get_level_values("bytes")) for s in measured.values()))
    )
    nodes = {
        name: yaml.safe_load((find_systems() / f"{device}.yaml").read_text("utf-8"))["node"]
        for name, (device, _) in DEVICES.items()
    }
    return {
        "source": f"{SOURCE} {version(SOURCE)}: systems/data/*/comm/nccl, the median over releases "
        "of NCCL and elements of one and two bytes; systems/*.yaml for the network",
        "license": "Apache-2.0, Copyright (c) 2025-2026 NVIDIA CORPORATION & AFFILIATES",
        "about": "tenths of microseconds by device, collective and ranks of a node, for each of "
        "bytes, those of the whole tensor",
        "bytes": [int(size) for size in sizes],
        "network_bytes_per_s": {name: int(node["inter_node_bw"]) for name, node in nodes.items()},
        "times": {
            name: {
                collective: {
                    str(ranks): [round(series[collective, ranks, size] * 1e7) for size in sizes]
                    for ranks in (2, 4, 8)
                }
                for collective in NAMES.values()
            }
            for name, series in measured.items()
        },
    }


def hold_out(document: dict[str, Any]) -> pd.DataFrame:
    """Predict each size of each row but the first and the last from the others."""
    sizes = document["bytes"]
    rows = []
    for device, by_collective in document["times"].items():
        for collective, by_ranks in by_collective.items():
            for ranks, times in by_ranks.items():
                for at in range(1, len(sizes) - 1):
                    others = [*sizes[:at], *sizes[at + 1 :]], [*times[:at], *times[at + 1 :]]
                    error = np.log(times[at] / interpolate_s(sizes[at], *others))
                    rows.append((device, collective, int(ranks), sizes[at], error))
    return pd.DataFrame(rows, columns=["device", "collective", "ranks", "bytes", "error"])


def describe(errors: pd.DataFrame) -> list[str]:
    """Lay out the errors of held-out sizes, by device and by collective."""
    groups = {"all": errors}
    groups |= {str(name): group for name, group in errors.groupby("device")}
    groups |= {str(name): group for name, group in errors.groupby("collective")}
    rows = []
    for name, group in groups.items():
        cells = [name]
        for some in (group[group["bytes"] > LARGE], group):
            off = np.abs(np.expm1(some["error"]))
            cells += [f"{off.median():.1%}", f"{off.quantile(0.9):.1%}"]
        rows.append(cells)
    heads = ("held out", "above 1 MiB: median error:", "90th percentile:", "all: median:", "90th:")
    return lay_out(heads, rows)


def compare_between_nodes() -> list[str]:
    """Predict what others measured between nodes."""
    rows = []
    errors = []
    for row in yaml.safe_load(MEASURED.read_text("utf-8")):
        target = getattr(datasheets, row["target"].upper())
        ranks = Parallel(
            kind="ddp",
            world_size=row["gpus"],
            gpus_per_node=row["gpus"] // row["nodes"],
            network_gb_per_s=row["gb_s_per_gpu"],
        )
        call = Collective(row["collective"], int(row["mib"] * 2**20), row["gpus"])
        seconds = CollectiveModel(target, ranks).predict(call).seconds
        predicted = bytes_each_way(*call) / seconds / 1e9
        errors.append(row["busbw_gb_s"] / predicted - 1)
        rows.append(
            (
                f"[{row['name']}]({row['source']})",
                *(f"{row['gpus']} {row['target']}", row["collective"], f"{row['mib']:,} MiB"),
                *(f"{row['busbw_gb_s']:,}", f"{predicted:.0f}", f"{errors[-1]:+.0%}"),
            )
        )
    heads = ("source", "GPUs", "collective", "size:", "measured GB/s:", "predicted GB/s:")
    within = sum(abs(math.log1p(error)) <= math.log(1.6) for error in errors)
    median = f"{statistics.median(map(abs, errors)):.0%}"
    told = f"Median absolute error {median}; {within} of {len(errors)} within 1.6 times."
    return [*lay_out((*heads, "error in time:"), rows), "", told]


def main() -> None:
    """Run from the command line."""
    parser = make_parser(__doc__)
    arguments = parser.parse_args()
    document = derive()
    errors = hold_out(document)
    document = {"spread": find_spread(errors["error"]), **document}
    text = json.dumps(document, separators=(",", ":"))
    text = text.replace('},"', '},\n"').replace('],"', '],\n"')
    (TABLES / f"{TABLE}.json").write_text(text + "\n", encoding="utf-8")
    lines = [*describe(errors), "", "## Between nodes", "", *compare_between_nodes()]
    publish(__doc__ or "", "\n".join(lines), arguments.output)


if __name__ == "__main__":
    main()
