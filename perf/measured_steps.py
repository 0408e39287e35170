"""Predicted time and memory of whole steps beside what was measured on GPUs.

Each row of measured_steps.json is a run of ``dpprof profile --instrument clean`` on a GPU: the
median of its timed steps, and the allocator's peaks. ``--collect`` adds the results in a folder.
The predictions are those of ``dpprof estimate``, which sees no GPU. ``--measure`` measures on a GPU
models that wait for their host and models that do not, each eager, as a CUDA graph and compiled.
Compiled steps are not predicted.

Rows of ``flash`` and ``flash-bk`` in bfloat16 from before the evening of 26 November 2026 ran code
that launched more kernels, or a slower kernel of Gram matrices (``older_code``): of these only
memory is compared. Of some rows not everything was kept.

Eager private steps of small kernels take longer than predicted, beyond the interval for some: they
wait for Python, and clipping runs more of it for an operator than a model does (one step of
llama-3.2-1b on an H200: Python took 65 ms plain and 202 to 277 ms with flash-bk and a head in
chunks; kernels took 94 and 134 ms).
As a CUDA graph they are as predicted.
"""

import itertools
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

from dpprof.experiments.config.datasheets import find_by_device_name
from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.records.result import Result, read_result
from dpprof.predict.estimate import estimate
from dpprof.system.console import say
from script import ignore, make_parser, publish

ROWS = Path(__file__).with_name("measured_steps.json")
SHAPES = {
    "1b": (8, 1024),
    "medium": (8, 512),
    "small": (4, 128),
    "hf:llama-3.2-1b": (4, 1024),
    "hf:smollm2-135m": (8, 512),
}
"""Samples and tokens by model."""

METHODS = ("standard", "flash-bk", "opacus-ghost")
EXECUTIONS = ("eager", "graph", "compiled")


class Row(NamedTuple):
    """A measured step and what was predicted of it."""

    device: str
    experiment: Experiment
    step_s: float
    peak_bytes: int | None
    reserved_bytes: int | None
    is_older: bool
    median_s: float
    low_s: float
    high_s: float
    predicted_peak_bytes: int
    predicted_reserved_bytes: int

    @property
    def error(self) -> float:
        """The prediction over the measurement, less one."""
        return self.median_s / self.step_s - 1

    @property
    def is_inside(self) -> bool:
        """Whether the measurement is inside the interval."""
        return self.low_s <= self.step_s <= self.high_s

    @property
    def peak_error(self) -> float | None:
        """The predicted peak over the measured one, less one."""
        return self.predicted_peak_bytes / self.peak_bytes - 1 if self.peak_bytes else None

    @property
    def reserved_error(self) -> float | None:
        """The same of reserved memory."""
        measured = self.reserved_bytes
        return self.predicted_reserved_bytes / measured - 1 if measured else None

    def tell(self) -> str:
        """Lay out a row."""
        one = self.experiment
        model = one.model if isinstance(one.model, str) else one.model_name
        head = "" if one.head == "logits" else f", head {one.head}"
        blocks = "" if one.checkpointing == "none" else ", checkpointed"
        told = [
            f"{self.median_s * 1e3:,.1f}",
            f"{self.low_s * 1e3:,.1f} to {self.high_s * 1e3:,.1f}",
            f"{self.error:+.1%}",
        ]
        told = ["", "", "older code"] if self.is_older else told
        told.append("" if self.peak_bytes is None else f"{self.peak_bytes / 2**20:,.0f}")
        both = self.peak_error, self.reserved_error
        told += ["" if one is None else f"{one:+.3%}" for one in both]
        return (
            f"| {self.device} | {model}{head}{blocks} | {one.method} | {one.execution} "
            f"| {one.dtype} | {one.batch_size} | {one.seq_len} | {self.step_s * 1e3:,.1f} "
            f"| {' | '.join(told)} |"
        )


def measure(folder: Path) -> None:
    """Measure every model, method and execution on this GPU; Opacus's method runs eagerly."""
    for (model, (samples, tokens)), method, execution in itertools.product(
        SHAPES.items(), METHODS, EXECUTIONS
    ):
        if method == "opacus-ghost" and execution != "eager":
            continue
        name = f"{model.removeprefix('hf:')}-{method}-{execution}.json"
        options = {
            "model": model,
            "method": method,
            "batch-size": samples,
            "seq-len": tokens,
            "dtype": "bfloat16",
            "optimizer": "adamw-fused",
            "device": "cuda",
            "execution": execution,
            "output": folder / name,
        }
        given = [f"--{key}={value}" for key, value in options.items()]
        subprocess.run([sys.executable, "-m", "dpprof", "profile", *given], check=False)


def collect(folder: Path) -> None:
    """Add the results of a folder to the rows; a row of the same device and experiment goes."""
    rows = {_key(row): row for row in json.loads(ROWS.read_text("utf-8"))}
    for path in sorted(folder.rglob("*.json")):
        result = read_result(path)
        if result.outcome == "ok" and result.instrument == "clean":
            row = _shorten(result)
            rows[_key(row)] = row
    ROWS.write_text(json.dumps(list(rows.values()), indent=1) + "\n", encoding="utf-8")


def _shorten(result: Result) -> dict[str, Any]:
    assert result.memory is not None
    assert result.time is not None
    return {
        "device": result.device["name"],
        "driver": result.device["driver"],
        "torch": result.provenance["packages"]["torch"],
        "started_at": result.started_at,
        "experiment": result.experiment.model_dump(mode="json"),
        "step_s": result.time.median_s,
        "peak_allocated_bytes": result.memory.peak_allocated_bytes,
        "peak_reserved_bytes": result.memory.peak_reserved_bytes,
        "joules_per_step": result.energy and result.energy.joules_per_step,
    }


def _key(row: dict[str, Any]) -> str:
    return json.dumps([row["device"], row["experiment"]])


def compare(row: dict[str, Any]) -> Row:
    """Predict a row's step."""
    target = find_by_device_name(row["device"])
    assert target is not None
    experiment = Experiment.model_validate(row["experiment"] | {"target": target})
    found = estimate(experiment, ignore)
    assert found.memory is not None
    assert found.time is not None
    step = found.time.predicted_step_s
    assert step is not None
    return Row(
        row["device"].removeprefix("NVIDIA ").partition(" ")[0],
        experiment,
        row["step_s"],
        row["peak_allocated_bytes"],
        row["peak_reserved_bytes"],
        row.get("older_code", False),
        step.median,
        step.low,
        step.high,
        int(found.memory.peak_allocated_bytes or 0),
        int(found.memory.peak_reserved_bytes or 0),
    )


def tabulate(rows: list[dict[str, Any]]) -> str:
    """Lay out the rows, and how far off they are."""
    heads = [
        "GPU",
        "model",
        "method",
        "execution",
        "dtype",
        "B",
        "T",
        "measured (ms)",
        "predicted (ms)",
    ]
    heads += [
        "90 % interval",
        "error",
        "peak measured (MiB)",
        "peak predicted",
        "reserved predicted",
    ]
    lines = [f"| {' | '.join(heads)} |", "| --- | --- | --- | --- | --- |" + " ---: |" * 9]
    compared = []
    for row in rows:
        if row["experiment"].get("execution") == "compiled":
            continue
        compared.append(compare(row))
        lines.append(compared[-1].tell())
        say(lines[-1])
    timed = [one for one in compared if not one.is_older]
    errors = [abs(one.error) for one in timed]
    inside = f"{sum(one.is_inside for one in timed)} of {len(timed)}"
    peaks = [abs(one.peak_error) for one in compared if one.peak_error is not None]
    reserved = [abs(one.reserved_error) for one in compared if one.reserved_error is not None]
    lines += ["", f"* step time: {_sum_up(errors, 1)}; {inside} inside the interval"]
    lines += [f"* peak of allocated memory: {_sum_up(peaks, 4)}"]
    lines += [f"* reserved memory: {_sum_up(reserved, 2)}"]
    return "\n".join(lines)


def _sum_up(errors: list[float], digits: int) -> str:
    median, most = statistics.median(errors), max(errors)
    return f"median absolute error {median:.{digits}%}, at most {most:.{digits}%}"


def main() -> None:
    """Run from the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--collect", type=Path, help="a folder of results to add to the rows")
    parser.add_argument("--measure", type=Path, help="a folder for results of this GPU")
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.measure)
        return
    if arguments.collect:
        collect(arguments.collect)
    publish(__doc__, tabulate(json.loads(ROWS.read_text("utf-8"))), arguments.output)


if __name__ == "__main__":
    main()
