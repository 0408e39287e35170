"""What private steps cost beside the standard one, over sequence lengths at fixed tokens.

Methods are set up side by side in one process and take steps in turn, A B C D E A B ..., so
that what slows the machine slows all of them; a ratio is the median over rounds of one
round's ratio. FLOPs and peaks are those that the instrument ``estimate`` counts, which on a
CPU are the allocator's to the byte (perf/accuracy.md). The claims, over the grid: against
opacus-ghost flash-bk is 2.5 times faster in the geometric mean and 5 times from 4,096 tokens
on, flash 1.8 times; flash-bk takes at most 1.3 times a standard step in the geometric mean
and 1.5 times anywhere; flash's peak is at most 1.05 times opacus-ghost's.

The rows named smollm2 are SmolLM2-135M with 3 of its 30 blocks and 8,192 of its 49,152 ids, so
that a round takes a minute on two cores; the width and everything else are the model's own. It
is trained as it is, with its embedding untied from its head, which Opacus's methods need, and
by adapters of rank 16. The claims there: flash-bk takes at most 1.3 times a standard step, and
1.15 times with adapters; trained whole, it is faster than opacus-hooks and opacus-ghost.
"""

import statistics
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt
import torch

from dpprof.experiments.config.experiment import Experiment
from dpprof.predict.estimate import estimate
from dpprof.results.figures.style import method_style
from dpprof.system.console import say
from interleave import prepare, take_turns, timed
from script import at_least, describe_place, end, ignore, lay_out, make_parser, publish

METHODS = ("standard", "opacus-ghost", "opacus-hooks", "flash", "flash-bk")
GRID = (
    *(("small", T, 8_192) for T in (128, 512, 1_024, 2_048, 4_096, 8_192)),
    *(("medium", T, 2_048) for T in (256, 1_024)),
)
_SMOLLM2 = {"hf": "smollm2-135m", "num_hidden_layers": 3, "vocab_size": 8_192}
HUGGING_FACE: dict[str, dict[str, object]] = {
    "smollm2": {"model": _SMOLLM2},
    "smollm2, untied": {"model": {**_SMOLLM2, "tie_word_embeddings": False}},
    "smollm2, LoRA": {"model": _SMOLLM2, "lora": {"rank": 16}},
}
HUGGING_FACE_GRID = tuple((name, 512, 4_096) for name in HUGGING_FACE)
REFUSED = {"smollm2": ("opacus-ghost", "opacus-hooks")}
"""Methods that refuse a model: Opacus's refuse tied weights that are trained."""

ROUNDS = 5
MIN_ROUNDS = 3
LONG = 4_096


class Shape(NamedTuple):
    """What all methods were measured on."""

    model: str
    T: int
    tokens: int


class Cost(NamedTuple):
    """One method on one shape."""

    step_s: list[float]
    flops: int
    peak_bytes: int


Row = dict[str, Cost]


def measure(shape: Shape, rounds: int) -> Row:
    """Run all methods in turn, and estimate each."""
    fields: dict[str, Any] = {
        "batch_size": shape.tokens // shape.T,
        "seq_len": shape.T,
        "device": "cpu",
        **HUGGING_FACE.get(shape.model, {"model": shape.model}),
    }
    methods = [name for name in METHODS if name not in REFUSED.get(shape.model, ())]
    asked = {name: Experiment.model_validate({**fields, "method": name}) for name in methods}
    counted = {name: estimate(experiment, ignore) for name, experiment in asked.items()}
    sides = {}
    for name in methods:
        training = prepare({**fields, "method": name})
        sides[name] = timed(partial(training.step.run, training.batch, ignore))
    where = f"{shape.model}, T = {shape.T}"
    steps = take_turns(sides, rounds, tell=lambda line: say(f"{where}: {line}"))
    row = {}
    for name, predicted in counted.items():
        assert predicted.compute is not None
        assert predicted.memory is not None
        assert predicted.memory.peak_allocated_bytes is not None
        peak = predicted.memory.peak_allocated_bytes
        row[name] = Cost(steps[name], predicted.compute.executed_flops, peak)
    return row


def ratio(row: Row, method: str, base: str) -> float:
    """Take the median over rounds of one method's time over another's."""
    pairs = zip(row[method].step_s, row[base].step_s, strict=True)
    return statistics.median(value / other for value, other in pairs)


def tabulate(rows: dict[Shape, Row]) -> str:
    """Lay out times, FLOPs and peaks, each over the standard step's."""
    table = []
    for shape, row in rows.items():
        base = row["standard"]
        cells = [shape.model, str(shape.T), str(shape.tokens // shape.T)]
        cells.append(f"{statistics.median(base.step_s):.2f}")
        for name in METHODS[1:]:
            if name not in row:
                cells.append("refuses it")
                continue
            flops, peak = row[name].flops / base.flops, row[name].peak_bytes / base.peak_bytes
            cells.append(f"{ratio(row, name, 'standard'):.2f}, {flops:.2f}, {peak:.2f}")
        for name in ("flash", "flash-bk"):
            is_there = "opacus-ghost" in row
            cells.append(f"{ratio(row, 'opacus-ghost', name):.2f}" if is_there else "")
        table.append(cells)
    heads = ["model", "T:", "B:", "standard (s):"]
    heads += [f"{name}: time, FLOPs, peak:" for name in METHODS[1:]]
    return "\n".join(lay_out([*heads, "ghost / flash:", "ghost / flash-bk:"], table))


class Claim(NamedTuple):
    """What a ratio is to be."""

    name: str
    value: float
    sign: str
    bound: float

    @property
    def holds(self) -> bool:
        """Whether it is."""
        return self.value >= self.bound if self.sign == ">=" else self.value <= self.bound


def summarise(rows: dict[Shape, Row]) -> tuple[str, list[str]]:
    """State what the claims are about; returns the sentences, and the claims that do not hold."""
    built_in = {shape: row for shape, row in rows.items() if shape.model not in HUGGING_FACE}
    claims = [*claim_built_in(built_in), *claim_hugging_face(rows)]
    lines = [f"* {c.name}: {c.value:.2f} (claim: {c.sign} {c.bound})" for c in claims]
    flops = statistics.geometric_mean(
        row["flash-bk"].flops / row["standard"].flops for row in built_in.values()
    )
    lines.append(f"* FLOPs of flash-bk / standard, geometric mean: {flops:.2f}")
    return "\n".join(lines), [claim.name for claim in claims if not claim.holds]


def claim_built_in(rows: dict[Shape, Row]) -> list[Claim]:
    """Make the claims over the grid of sequence lengths."""
    mean = statistics.geometric_mean
    over = [ratio(row, "flash-bk", "standard") for row in rows.values()]
    faster = {
        m: [ratio(r, "opacus-ghost", m) for r in rows.values()] for m in ("flash", "flash-bk")
    }
    long = [ratio(r, "opacus-ghost", "flash-bk") for s, r in rows.items() if s.T >= LONG]
    peaks = [r["flash"].peak_bytes / r["opacus-ghost"].peak_bytes for r in rows.values()]
    return [
        Claim("opacus-ghost / flash-bk, geometric mean", mean(faster["flash-bk"]), ">=", 2.5),
        Claim("opacus-ghost / flash, geometric mean", mean(faster["flash"]), ">=", 1.8),
        Claim("flash-bk / standard, geometric mean", mean(over), "<=", 1.3),
        Claim("flash-bk / standard, largest", max(over), "<=", 1.5),
        Claim("peak of flash / opacus-ghost, largest", max(peaks), "<=", 1.05),
        Claim(f"opacus-ghost / flash-bk from T = {LONG:,} on, smallest", min(long), ">=", 5.0),
    ]


def claim_hugging_face(rows: dict[Shape, Row]) -> list[Claim]:
    """Make the claims for each Hugging Face model."""
    claims = []
    for shape, row in rows.items():
        if shape.model not in HUGGING_FACE:
            continue
        has_adapters = "lora" in HUGGING_FACE[shape.model]
        most = 1.15 if has_adapters else 1.3
        over = ratio(row, "flash-bk", "standard")
        claims.append(Claim(f"flash-bk / standard, {shape.model}", over, "<=", most))
        claims += [
            Claim(f"{opacus} / flash-bk, {shape.model}", ratio(row, opacus, "flash-bk"), ">=", 1.0)
            for opacus in ("opacus-hooks", "opacus-ghost")
            if opacus in row and not has_adapters
        ]
    return claims


def draw(rows: dict[Shape, Row], path: Path) -> None:
    """Draw times and peaks over the standard step's, over sequence length."""
    shown = {shape.T: row for shape, row in rows.items() if shape.model == GRID[0][0]}
    figure, axes = plt.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for method in METHODS[1:]:
        times = [ratio(row, method, "standard") for row in shown.values()]
        peaks = [row[method].peak_bytes / row["standard"].peak_bytes for row in shown.values()]
        for panel, values in zip(axes, (times, peaks), strict=True):
            panel.plot(list(shown), values, label=method, **method_style(method))
    for panel, what in zip(axes, ("step time", "peak memory"), strict=True):
        panel.axhline(1, color="0.6", linewidth=1, zorder=0)
        panel.set_xscale("log", base=2)
        panel.set_xticks(list(shown), [f"{T:,}" for T in shown])
        panel.set_ylim(bottom=0)
        panel.set_xlabel("tokens of a sample (8,192 tokens a step)")
        panel.set_ylabel(f"{what} / standard")
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Run from the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", **at_least(MIN_ROUNDS, ROUNDS))
    parser.add_argument("--figure", type=Path, help="a picture file for the figure")
    arguments = parser.parse_args()
    grid = [Shape(*shape) for shape in (*GRID, *HUGGING_FACE_GRID)]
    rows = {shape: measure(shape, arguments.rounds) for shape in grid}
    claims, missed = summarise(rows)
    place = describe_place("torch", "opacus", threads=torch.get_num_threads())
    text = f"{place}; {arguments.rounds} rounds.\n\n{tabulate(rows)}\n\n{claims}"
    publish(__doc__, text, arguments.output)
    if arguments.figure:
        draw(rows, arguments.figure)
    end("beyond its claim", missed)


if __name__ == "__main__":
    main()
