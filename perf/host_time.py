"""Python's time in an eager private step, beside a plain one, on a model whose kernels take none.

A GPU waits for Python where kernels are short: small batches, adapters. Here a Llama of 16 layers
of width 64, on 4 samples of 16 tokens, steps in one thread, so that CPU time is the time of Python
and of starting operators. All methods are set up in one process and step in turn; a ratio is the
median over rounds. The claims: flash-bk takes at most 2.7 times a plain step, also with adapters of
rank 16 on seven matrices; flash at most 3.7 times.

    python perf/host_time.py --output perf/host_time.md
"""

import time
from functools import partial

import torch

from dpprof.system.console import say
from interleave import (
    MIN_PAIRS,
    Comparison,
    Side,
    compare,
    prepare,
    tabulate,
    take_turns,
    timed,
)
from script import at_least, describe_place, end, ignore, make_parser, publish

LLAMA = {
    "hf": "llama-3.2-1b",
    "hidden_size": 64,
    "intermediate_size": 256,
    "num_hidden_layers": 16,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 256,
}
BATCH = {"batch_size": 4, "seq_len": 16, "optimizer": "adamw"}
TRAININGS: dict[str, dict[str, object]] = {
    "whole": {"model": LLAMA},
    "LoRA": {"model": LLAMA, "lora": {"rank": 16, "target_modules": "all-linear"}},
}
LIMITS = {"flash-bk": 2.7, "flash": 3.7}
"""The most that a method's step may take of a plain one's."""


def make_side(method: str, fields: dict[str, object]) -> Side:
    """Return what measures the CPU time of a step."""
    training = prepare({**fields, **BATCH, "method": method})
    for group in training.step.optimizer.param_groups:
        group["foreach"] = True  # as on a GPU
    step = partial(training.step.run, training.batch, ignore)
    return timed(step, clock=time.process_time)


def measure(training: str, rounds: int) -> list[Comparison]:
    """Let all methods of a training step in turn."""
    sides = {name: make_side(name, TRAININGS[training]) for name in ("standard", *LIMITS)}
    taken = take_turns(sides, rounds, 2)
    say(f"{training}: {rounds} rounds")
    return compare(taken, "standard", f"{training}, ")


def main() -> None:
    """Run from the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", **at_least(MIN_PAIRS, 40))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for training in TRAININGS for row in measure(training, arguments.rounds)]
    place = describe_place("torch", "transformers", "peft", threads=1)
    text = f"{place}.\n\n{tabulate(rows, 'ms of CPU time', 1e3)}"
    publish(__doc__, text, arguments.output)
    limits = zip(rows, [*LIMITS.values()] * len(TRAININGS), strict=True)
    end("beyond its limit", [row.name for row, limit in limits if row.ratio > limit])


if __name__ == "__main__":
    main()
