"""Differences of two invented runs, for tests of what is said and drawn of them."""

from dpprof.experiments.records.step_costs import Timeline
from dpprof.results.analysis.difference.difference import Difference, Side, share_axis
from dpprof.results.analysis.difference.waterfall import subtract


def make_difference(a, b, names=("flash", "standard"), shared=("model tiny",)) -> Difference:
    """Make a difference of holdings, each a component, a layer, an operator and its bytes."""
    rows = [
        [
            {"component": component, "layer": layer, "op": op, "bytes": size}
            | {"phase": "backward", "storages": 1}
            for component, layer, op, size in side
        ]
        for side in (a, b)
    ]
    sides = [
        Side(
            name=name,
            method=name.partition(" ")[0],
            experiment_id="x-1",
            instrument="memory",
            replicate=0,
            predicted=False,
            peak_bytes=sum(row["bytes"] for row in held),
            phase="backward",
            module="head",
            op="mm",
        )
        for name, held in zip(names, rows, strict=True)
    ]
    lines = [
        Timeline(
            ops=[0, 4, 10],
            elapsed_s=None,
            phase=["forward", "backward", "backward"],
            components={"parameters": [side.peak_bytes // 2, side.peak_bytes, 0]},
        )
        for side in sides
    ]
    return Difference(
        a=sides[0],
        b=sides[1],
        shared=shared,
        bars=subtract(*rows),
        axis=share_axis(*lines),
    )
