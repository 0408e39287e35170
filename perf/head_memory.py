"""What a private step without logits holds beside a plain one with logits.

For each preset and each Hugging Face model that comes with dpprof: the predicted peaks of standard
with logits, and of flash-bk with a head in chunks, bfloat16 on an H100. Models of 2e9 parameters or
more are trained by adapters, as people do. The claim: the private step holds less in every row.
"""

from pathlib import Path
from typing import Any, NamedTuple

import matplotlib.pyplot as plt

from dpprof.experiments.config import registry
from dpprof.experiments.config.architecture import bundled_names
from dpprof.experiments.config.experiment import Experiment
from dpprof.predict.estimate import estimate
from dpprof.results.figures.style import method_style
from dpprof.system.console import say
from script import end, ignore, lay_out, make_parser, publish

BATCH, TOKENS = 8, 1024
ADAPTED = ("gemma-2-2b", "llama-3.1-8b", "mistral-7b-v0.3", "qwen2.5-7b")
GIB = 2**30


class Row(NamedTuple):
    """A model's peaks in bytes."""

    model: str
    plain: int
    chunked: int
    kept: int


def list_models() -> dict[str, dict[str, Any]]:
    """List what is trained, by its name in the table."""
    trained: dict[str, dict[str, Any]] = {
        name: {"model": name} for name in registry.names("models")
    }
    for name in bundled_names():
        if not name.startswith("tiny-"):
            lora = {"lora": "rank=16"} if name in ADAPTED else {}
            trained[f"{name}{', LoRA' if lora else ''}"] = {"model": f"hf:{name}", **lora}
    return trained


def find_peak(fields: dict[str, Any], method: str, head: str) -> int:
    """Predict a peak."""
    common = {"batch_size": BATCH, "seq_len": TOKENS, "dtype": "bfloat16", "device": "cuda"}
    fields = {**common, **fields, "method": method, "head": head, "target": "h100"}
    result = estimate(Experiment.model_validate(fields), ignore)
    assert result.memory is not None
    assert result.memory.peak_allocated_bytes is not None
    return result.memory.peak_allocated_bytes


def draw(rows: list[Row], path: Path) -> None:
    """Draw the peaks, each over that of the plain step."""
    figure, axes = plt.subplots(figsize=(6.4, 0.34 * len(rows) + 1.2), layout="constrained")
    at = range(len(rows))
    sides = (("chunked", -0.2, 1.0), ("kept", 0.2, 0.5))
    for head, shift, alpha in sides:
        axes.barh(
            [place + shift for place in at],
            [getattr(row, head) / row.plain for row in rows],
            0.38,
            color=method_style("flash-bk")["color"],
            alpha=alpha,
            label=f"flash-bk, head {head}",
        )
    axes.axvline(1, color=method_style("standard")["color"], label="standard, with logits")
    axes.set_yticks(list(at), [row.model for row in rows])
    axes.invert_yaxis()
    axes.set_xlabel(f"predicted peak over plain training's; {BATCH} x {TOKENS:,} tokens, bfloat16")
    figure.legend(loc="outside upper center", ncols=3, fontsize=8)
    figure.savefig(path, dpi=150)


def main() -> None:
    """Run from the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--figure", type=Path, help="draw the table to this file")
    arguments = parser.parse_args()
    rows = []
    for name, fields in list_models().items():
        ways = (("standard", "logits"), ("flash-bk", "chunked"), ("flash-bk", "kept"))
        rows.append(Row(name, *(find_peak(fields, *way) for way in ways)))
        say(f"{name}: {rows[-1].chunked / rows[-1].plain:.2f}")
    heads = ("model", "standard, logits (GiB):", "flash-bk, chunked:", "flash-bk, kept:")
    cells = [(name, *(f"{peak / GIB:.2f}" for peak in peaks)) for name, *peaks in rows]
    publish(__doc__, "\n".join(lay_out(heads, cells)), arguments.output)
    if arguments.figure is not None:
        draw(rows, arguments.figure)
    end("holds more than plain training", [row.model for row in rows if row.chunked >= row.plain])


if __name__ == "__main__":
    main()
