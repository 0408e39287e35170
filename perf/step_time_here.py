"""Predicted times of steps on this processor beside what was measured.

Every method, on two models and three lengths. The machine's speed drifts, so of each cell the
rounds in which its operators are timed alternate with the steps that are measured. The prediction
knows the operators' times, none of the steps', and how much longer operators take in a step than
alone, from a step of another shape (small, standard, T 256, B 4) that is measured before each group
of cells. Before the cells, all operators are timed together in as many rounds and held out by their
sizes: each is predicted from those of the same operator at other sizes. One thread computes: two
wait for each other wherever another process takes a core from one, and then it is the machine's
neighbours that are timed.
"""

import gc
import itertools
import json
import math
import statistics
import time
from collections import defaultdict
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from dpprof.experiments.config import registry
from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.records.operators import OperatorTable
from dpprof.measure.devices.selection import open_device
from dpprof.measure.instruments.operators import (
    ROUNDS,
    BesideOperators,
    OperatorTimer,
    list_ops,
    time_beside_operators,
    time_in_turn,
)
from dpprof.predict.memory.events import Op
from dpprof.predict.step_time.own_table import OwnTable
from dpprof.predict.step_time.predict import predict_step_here
from dpprof.system.console import say
from script import lay_out, make_parser, publish

BATCHES = {128: 4, 512: 2, 2048: 1}
STEPS = {128: 3, 512: 3, 2048: 1}
"""Measured after each round, by sequence length."""


class Cell(NamedTuple):
    """A step that was predicted, then measured."""

    model: str
    method: str
    seq_len: int
    step_s: list[float]
    median_s: float
    low_s: float
    high_s: float

    @property
    def measured_s(self) -> float:
        """The median of the measured steps."""
        return statistics.median(self.step_s)

    @property
    def error(self) -> float:
        """The prediction over the measurement, less one."""
        return self.median_s / self.measured_s - 1

    @property
    def is_inside(self) -> bool:
        """Whether the measurement is inside the interval."""
        return self.low_s <= self.measured_s <= self.high_s

    @property
    def told(self) -> list[str]:
        """The row of the table."""
        spread = max(self.step_s) / min(self.step_s) - 1
        times = (self.measured_s, self.median_s, self.low_s, self.high_s)
        measured, median, low, high = (f"{time * 1e3:,.0f}" for time in times)
        return [
            *(self.model, str(self.seq_len), str(BATCHES[self.seq_len]), self.method),
            *(measured, f"{spread:.0%}", median, f"{low} to {high}", f"{self.error:+.1%}"),
        ]


def run(ops: list[Op], beside: BesideOperators, experiment: Experiment) -> Cell:
    """Time a step's operators and the step in turn, and predict it from its operators."""
    steps, timer = time_in_turn(experiment, ops, STEPS[experiment.seq_len])
    predicted = predict_step_here(ops, tabulate_operators(timer, beside))
    gc.collect()
    return Cell(
        str(experiment.model),
        experiment.method,
        experiment.seq_len,
        steps,
        predicted.median,
        predicted.low,
        predicted.high,
    )


def tabulate_operators(timer: OperatorTimer, beside: BesideOperators) -> OwnTable:
    """Return what was timed as a table."""
    operators, drift = timer.tabulate()
    table = OperatorTable(
        operators=operators,
        threads=torch.get_num_threads(),
        rounds=ROUNDS,
        drift=drift,
        **beside._asdict(),
        experiments=[],
        left_out=timer.failed,
        wall_s=0.0,
    )
    return OwnTable(table)


def rank(cells: list[Cell]) -> tuple[float, int]:
    """Return Kendall's tau of predicted and measured times, and how many pairs it is of.

    Pairs whose measured steps overlap are left out: which of them is faster is noise.
    """
    agreeing = pairs = 0
    groups: dict[tuple[str, int], list[Cell]] = defaultdict(list)
    for cell in cells:
        groups[cell.model, cell.seq_len].append(cell)
    for group in groups.values():
        for pair in itertools.combinations(group, 2):
            faster, slower = sorted(pair, key=lambda cell: cell.measured_s)
            if max(faster.step_s) >= min(slower.step_s):
                continue
            pairs += 1
            agreeing += 1 if faster.median_s < slower.median_s else -1
    return agreeing / pairs if pairs else math.nan, pairs


def tabulate(cells: list[Cell], table: OwnTable) -> str:
    """Lay out the cells, and how far off they are."""
    errors = [abs(cell.error) for cell in cells]
    tau, pairs = rank(cells)
    held_out = [abs(predicted / true - 1) for predicted, true, _ in table.hold_out()]
    weights = [true for _, true, _ in table.hold_out()]
    order = np.argsort(held_out)
    half = np.searchsorted(np.cumsum(np.array(weights)[order]), math.fsum(weights) / 2)
    heads = ("model", "T:", "B:", "method", "measured (ms):", "spread:", "predicted (ms):")
    inside = sum(cell.is_inside for cell in cells)
    lines = lay_out((*heads, "90 % interval:", "error:"), (cell.told for cell in cells))
    lines += [""]
    lines += [f"* steps: {_sum_up(errors)}; {inside} of {len(cells)} inside the 90 % interval"]
    lines += [f"* Kendall's tau of the ranking of methods: {tau:.2f}, of {pairs} pairs"]
    lines += [f"* operators predicted from other sizes: {_sum_up(held_out)}, of {len(held_out):,}"]
    lines += [f"* the same, each counted by its time: median {held_out[order[half]]:.1%}"]
    lines += [
        f"* speed between rounds of all operators: {math.expm1(table.drift):.0%} (one spread)"
    ]
    return "\n".join(lines)


def _sum_up(errors: list[float]) -> str:
    high = np.quantile(errors, 0.9)
    return f"median absolute error {statistics.median(errors):.1%}, 90th percentile {high:.1%}"


def read_cells(path: Path | None) -> dict[tuple[str, str, int], Cell]:
    """Read the cells of an earlier run."""
    lines = path.read_text(encoding="utf-8").splitlines() if path and path.exists() else []
    cells = [Cell(*json.loads(line)) for line in lines]
    return {(cell.model, cell.method, cell.seq_len): cell for cell in cells}


def keep_cell(path: Path | None, cell: Cell) -> None:
    """Append a cell to the file."""
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(cell) + "\n")


def describe(model: str, seq_len: int, method: str) -> Experiment:
    """Return the experiment of a cell."""
    return Experiment.model_validate(
        {
            "model": model,
            "method": method,
            "batch_size": BATCHES[seq_len],
            "seq_len": seq_len,
            "device": "cpu",
            "noise_multiplier": 0.05,  # Opacus's adaptive clipping takes batches above 10 x it
        }
    )


def main() -> None:
    """Run from the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=["small", "medium"])
    parser.add_argument("--methods", nargs="+", default=registry.names("methods"))
    parser.add_argument("--seq-lens", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--threads", type=int, default=1, help="for steps and operators alike")
    parser.add_argument(
        "--cells", type=Path, help="a file that keeps each cell, so that a run can be continued"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    start = time.monotonic()

    def tell(text: str) -> None:
        say(f"{time.monotonic() - start:5.0f} s {text}")

    grid = itertools.product(arguments.models, arguments.seq_lens, arguments.methods)
    ops = {experiment: list_ops(experiment) for experiment in itertools.starmap(describe, grid)}
    device = open_device("cpu")
    timer = OperatorTimer(device)
    for some in ops.values():
        timer.add(some)
    tell("timed all operators once")
    for _ in range(ROUNDS - 1):
        timer.repeat()
        tell("timed all operators once more")
    table = tabulate_operators(timer, BesideOperators(0.0, 0.0, 1.0))
    kept = read_cells(arguments.cells)
    cells = []
    for _, group in itertools.groupby(ops, lambda cell: (str(cell.model), cell.seq_len)):
        beside: BesideOperators | None = None
        for experiment in group:
            cell = kept.get((str(experiment.model), experiment.method, experiment.seq_len))
            if cell is None:
                if beside is None:
                    beside = time_beside_operators()
                    tell(f"operators take {beside.step_factor:.2f} times as long in a step")
                cell = run(ops[experiment], beside, experiment)
                keep_cell(arguments.cells, cell)
            cells.append(cell)
            tell(" ".join(cell.told))
    publish(__doc__, tabulate(cells, table), arguments.output)


if __name__ == "__main__":
    main()
