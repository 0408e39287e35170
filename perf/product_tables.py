"""Derive the tables of products' speeds that are part of dpprof, and say how exact they are.

The measurements are those of NVIDIA's aiconfigurator-core (PyPI, Apache-2.0), which timed
``torch.nn.functional.linear`` in bfloat16 under three serving frameworks. A derived table keeps
the share of the roofline that the median of the three reached, at sizes that training has. Errors
are of shapes of the table, each predicted from all others (held out), and of measured shapes that
the table has not (left out); the worse of the two is the spread of what is interpolated. The spread
of products with more rows than a table has is that of the shapes with most rows, predicted from
tables that end below them.

    pip install aiconfigurator-core
    python perf/product_tables.py
"""

import argparse
import json
import sys
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from dpprof.experiments.config.datasheets import A100, B200, H100, H200, L40S
from dpprof.experiments.config.target import Target
from dpprof.experiments.records.terms import BASES
from dpprof.predict.step_time.op_time import Z_90
from dpprof.predict.step_time.product_table import UNIT, PeakRates, ProductTable, bound_s
from dpprof.system.console import say

SOURCE = "aiconfigurator-core"
TABLES = Path(str(files("dpprof.predict.step_time") / "tables"))
DEVICES: dict[str, tuple[str, Target]] = {
    "a100": ("a100_sxm", A100),
    "b200": ("b200_sxm", B200),
    "h100": ("h100_sxm", H100),
    "h200": ("h200_sxm", H200),
    "l40s": ("l40s", L40S),
}
ROWS = [32, 64, 128, 192, *range(256, 4353, 256), 8192, 16384, 32768]
LARGE = 512
"""The errors of products whose sizes are all at least this are said apart."""

HELD_OUT = 2_000
ITEMSIZE = 2


def find_systems() -> Path:
    """Return the folder of the measurements."""
    return Path(str(files(SOURCE.replace("-", "_")) / "systems"))


def read_measured(device: str) -> pd.DataFrame:
    """Read the seconds of bfloat16 products: one row a shape, one column a framework."""
    columns = {}
    for framework in sorted((find_systems() / "data" / device / "gemm").iterdir()):
        tables = framework.glob("*/gemm_perf.parquet")
        newest = max(tables, key=lambda path: path.parent.name, default=None)
        if newest is not None:
            products = pd.read_parquet(newest)
            products = products[products["gemm_dtype"] == "bfloat16"]
            columns[framework.name] = products.groupby(["m", "n", "k"])["latency"].median() / 1e3
    return pd.DataFrame(columns)


def share_of_roofline(seconds: pd.Series, target: Target) -> pd.Series:
    """Divide the roofline's time by the time measured, for every shape."""
    peaks = PeakRates(target.flops_per_s["bfloat16"], target.bandwidth_bytes_per_s)
    m, n, k = (seconds.index.get_level_values(name).to_numpy(float) for name in ("m", "n", "k"))
    return pd.Series(bound_s((1, m, n, k), ITEMSIZE, peaks), seconds.index) / seconds


Errors = dict[str, pd.DataFrame]
"""Logarithms of measured over predicted shares with m, n and k, by how shapes were chosen."""


def derive(name: str) -> tuple[dict[str, Any], Errors]:
    """Return the content of a device's table, and its errors."""
    device, target = DEVICES[name]
    measured = read_measured(device)
    shares = share_of_roofline(measured.median(axis=1), target)
    sizes = {
        "m": ROWS,
        "n": sorted(set(shares.index.get_level_values("n"))),
        "k": sorted(set(shares.index.get_level_values("k"))),
    }
    grid = pd.MultiIndex.from_product(list(sizes.values()), names=list(sizes))
    parts = (shares.reindex(grid) * UNIT).round().fillna(0).astype(int)
    shape = [len(size) for size in sizes.values()]
    document = {
        "device": name,
        "source": f"{SOURCE} {version(SOURCE)}: systems/data/{device}/gemm, bfloat16; the median "
        f"over {', '.join(measured.columns)}",
        "license": "Apache-2.0, Copyright (c) 2025-2026 NVIDIA CORPORATION & AFFILIATES",
        "about": "shares of the data sheet's roofline in parts of 10,000, by m, n and k; 0 where "
        "nothing was measured; above 10,000 where the operands were in the cache",
        **{key: [int(size) for size in value] for key, value in sizes.items()},
        "shares": parts.to_numpy().reshape(shape).tolist(),
        "spreads": dict.fromkeys(BASES, 0.0),
        "more_rows_spread": 0.0,
    }
    table = ProductTable(document)
    errors = {"held out": hold_out(table), "left out": leave_out(table, shares.dropna())}
    more_rows = {f"{by} times as many rows": extrapolate(document, by) for by in (2, 4)}
    repeats = np.abs(np.log(measured.div(measured.median(axis=1), axis=0).to_numpy()))
    interpolated = max(find_spread(kind["error"]) for kind in errors.values())
    document["spreads"] = {
        "measured at this shape": find_spread(repeats[np.isfinite(repeats)]),
        "interpolated": interpolated,
        "extrapolated": 2 * interpolated,
    }
    worst = max(find_spread(kind["error"]) for kind in more_rows.values())
    document["more_rows_spread"] = max(worst, interpolated)
    return document, errors | more_rows


def find_spread(errors: Any) -> float:
    """Return the standard deviation for which 90 % of the errors are within the 90 % interval."""
    return round(float(np.quantile(np.abs(errors), 0.9)) / Z_90, 4)


def hold_out(table: ProductTable) -> pd.DataFrame:
    """Predict shapes of a table from all others."""
    chosen = np.random.default_rng(0).permutation(len(table.shapes))[:HELD_OUT]
    shapes = pd.DataFrame(table.shapes[chosen], columns=["m", "n", "k"])
    everything = np.arange(len(table.shapes))
    predicted = [table.fit(table.shapes[at].tolist(), everything != at) for at in chosen]
    return shapes.assign(error=np.log(table.shares[chosen] / predicted))


def leave_out(table: ProductTable, shares: pd.Series) -> pd.DataFrame:
    """Predict measured shapes whose m is not in a table; half of these are one row off a tile."""
    others = shares[~shares.index.get_level_values("m").isin(ROWS)]
    others = others.sample(HELD_OUT, random_state=0)
    shapes = others.index.to_frame(index=False)
    predicted = [table.find(m, n, k)[0] for m, n, k in shapes.to_numpy().tolist()]
    return shapes.assign(error=np.log(others.to_numpy() / predicted))


def extrapolate(document: dict[str, Any], by: int) -> pd.DataFrame:
    """Predict the shapes with most rows from a table that ends ``by`` times below them."""
    table = ProductTable(document)
    kept = sum(m <= ROWS[-1] // by for m in document["m"])
    shorter = document | {name: document[name][:kept] for name in ("m", "shares")}
    most = np.flatnonzero(table.shapes[:, 0] == ROWS[-1])
    shapes = pd.DataFrame(table.shapes[most], columns=["m", "n", "k"])
    find = ProductTable(shorter).find
    predicted = [find(m, n, k)[0] for m, n, k in shapes.to_numpy().tolist()]
    return shapes.assign(error=np.log(table.shares[most] / predicted))


def describe(document: dict[str, Any], errors: Errors) -> list[str]:
    """Say a table's errors, a line for each kind of shapes."""
    lines = [f"{document['device']}: {np.count_nonzero(document['shares']):,} shapes"]
    for what, shapes in errors.items():
        large = shapes[(shapes[["m", "n", "k"]] >= LARGE).all(axis=1)]
        for kind, some in {f"all sizes at least {LARGE}": large, "all": shapes}.items():
            off = np.abs(np.expm1(some["error"]))
            lines.append(
                f"  {what}, {kind}: {len(some):,} shapes, median error {off.median():.1%}, "
                f"90th percentile {off.quantile(0.9):.1%}"
            )
    return lines


def write(document: dict[str, Any], path: Path) -> None:
    """Write a table's file: one line for each m and n."""
    head = {key: value for key, value in document.items() if key != "shares"}
    rows = ",\n".join(
        "[" + ",\n".join(json.dumps(row, separators=(",", ":")) for row in plane) + "]"
        for plane in document["shares"]
    )
    text = json.dumps(head, indent=1)[:-2] + f',\n "shares": [\n{rows}\n]\n}}\n'
    path.write_text(text, encoding="utf-8")


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--device", choices=DEVICES, nargs="*", default=list(DEVICES))
    parser.add_argument("--output-dir", type=Path, default=TABLES)
    arguments = parser.parse_args()
    try:
        version(SOURCE)
    except ModuleNotFoundError:
        sys.exit(f"{SOURCE} is not installed: pip install {SOURCE}")
    for name in arguments.device:
        document, errors = derive(name)
        write(document, arguments.output_dir / f"{name}.json")
        for line in describe(document, errors):
            say(line)


if __name__ == "__main__":
    main()
