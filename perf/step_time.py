"""Predicted times of whole training steps on GPUs beside what others published.

The published figures are those of llm-foundry's training benchmarks (mosaicml/llm-foundry,
scripts/train/benchmarking/README.md at 061f2c7): MPT models in bfloat16 with AdamW on 8 H100s, each
step of a GPU one micro-batch, without activation checkpointing. The predictions were not fitted to
them. They are for one GPU: what FSDP communicates is left out, and each GPU updates all parameters
instead of an eighth. Attention was a Triton kernel of 2023 there (submit_benchmarks.py beside the
table: ``attn_impl`` is ``triton``), and is PyTorch's here, which is faster: errors grow with T.
"""

import argparse
import statistics
import sys
from pathlib import Path
from typing import NamedTuple

from dpprof.cli.options import make_experiment
from dpprof.instruments.memory import estimate
from dpprof.records.result import PredictedTime
from dpprof.records.terms import Phase
from dpprof.system.console import say

VOCABULARY = 50_368
MODELS = {  # d_model, layers, heads
    "760m": (1536, 24, 12),
    "1b": (2048, 24, 16),
    "3b": (2560, 32, 20),
    "7b": (4096, 32, 32),
}


class Published(NamedTuple):
    """A row of the benchmarks: what one GPU did."""

    model: str
    seq_len: int
    batch_size: int
    tokens_per_s: int

    @property
    def step_s(self) -> float:
        """Seconds of a step with one micro-batch."""
        return self.batch_size * self.seq_len / self.tokens_per_s


PUBLISHED = [
    Published("760m", 512, 96, 83_749),
    Published("760m", 1024, 48, 78_581),
    Published("760m", 2048, 24, 63_147),
    Published("760m", 4096, 12, 55_459),
    Published("1b", 512, 56, 52_275),
    Published("1b", 1024, 18, 48_910),
    Published("1b", 2048, 14, 45_455),
    Published("1b", 4096, 7, 38_535),
    Published("1b", 8192, 3, 29_157),
    Published("3b", 512, 40, 27_965),
    Published("3b", 1024, 20, 27_046),
    Published("3b", 4096, 5, 20_964),
    Published("3b", 8192, 3, 16_578),
    Published("7b", 2048, 6, 10_643),
]


def ignore(_phase: Phase) -> None:
    """Do nothing as a phase begins."""


def predict(row: Published) -> PredictedTime:
    """Predict a row's step on one H100."""
    d_model, layers, heads = MODELS[row.model]
    sizes = f"vocab_size: {VOCABULARY}, d_model: {d_model}, layers: {layers}, heads: {heads}"
    fields = {
        "model": f"{{{sizes}}}",
        "method": "standard",
        "batch_size": str(row.batch_size),
        "seq_len": str(row.seq_len),
        "dtype": "bfloat16",
        "target": "h100",
    }
    time = estimate(make_experiment(fields), ignore).time
    assert time is not None
    assert time.predicted_step_s is not None
    return time.predicted_step_s


def tabulate() -> str:
    """Lay out the rows, and how far off they are."""
    lines = [
        "| model | T | B | published (ms) | predicted (ms) | 90 % interval | error |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    errors, inside = [], 0
    for row in PUBLISHED:
        step = predict(row)
        error = step.median / row.step_s - 1
        errors.append(abs(error))
        inside += step.low <= row.step_s <= step.high
        interval = f"{step.low * 1e3:,.0f} to {step.high * 1e3:,.0f}"
        lines.append(
            f"| {row.model} | {row.seq_len} | {row.batch_size} | {row.step_s * 1e3:,.0f} "
            f"| {step.median * 1e3:,.0f} | {interval} | {error:+.1%} |"
        )
        say(lines[-1])
    lines += [
        "",
        f"* median absolute error: {statistics.median(errors):.1%}",
        f"* inside the 90 % interval: {inside} of {len(errors)}",
    ]
    return "\n".join(lines)


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, help="a Markdown file for the table")
    arguments = parser.parse_args()
    table = tabulate()
    if arguments.output:
        arguments.output.write_text(f"{__doc__}\n{table}\n", encoding="utf-8")
    sys.stdout.write(f"{table}\n")


if __name__ == "__main__":
    main()
