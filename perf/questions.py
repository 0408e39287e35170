"""How long do answers take? Whole commands beside ``import torch, opacus``.

Each command starts in an empty folder and ends with its answer. A round is one bare import and each
command once; the ratio is within a round, in elapsed time. Memory is the most that all processes of
a command hold at once (the sum of their proportional set sizes).

Before blocks followed from a few of them, and methods shared a process, ``advise`` of the 1b took
66 imports, that of Llama-3.1-8B with LoRA 153, a capacity of flash-bk 19, and an estimate 3. Three
lengths are drawn at random, with a fixed seed: nobody chose them because they are fast.
"""

import contextlib
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

import psutil

from cheap_runs import RUN
from dpprof.system.console import say
from dpprof.system.paths import PACKAGE
from script import IMPORTS, at_least, describe_place, end, lay_out, make_parser, publish

_LENGTHS = random.Random(69).sample(range(128, 4097), 3)  # noqa: S311 (no secret)
_ANY_1B = "--model 1b --target h200 --dtype bfloat16 --seq-len"
_1B = f"{_ANY_1B} 1024"
_LORA = "--model hf:llama-3.1-8b --lora rank=16 --target h100 --seq-len 2048 --dtype bfloat16"
_RANK = "--model hf:llama-3.1-8b --seq-len 4096 --dtype bfloat16 --target h100 --batch-size 1"


class Question(NamedTuple):
    """A command, and what it may take."""

    name: str
    command: str
    most_imports: float
    before: str = ""  # a command that is given first, in the same folder; its time does not count


QUESTIONS = (
    Question("advise, 1b, all methods", f"advise {_1B} --again", 8),
    Question("advise, llama-3.1-8b, LoRA and whole", f"advise {_LORA} --again", 15),
    Question("capacity, 1b, flash-bk", f"advise {_1B} --methods flash-bk --again", 3),
    *(Question(f"advise, 1b, {T:,} tokens", f"advise {_ANY_1B} {T} --again", 8) for T in _LENGTHS),
    *(
        Question(
            f"capacity, 1b, flash-bk, {T:,} tokens",
            f"advise {_ANY_1B} {T} --methods flash-bk --again",
            3,
        )
        for T in _LENGTHS
    ),
    Question(
        "budget, 1b, all mechanisms",
        f"budget {_1B} --samples 1e6 --tokens 2e9 --epsilon 8 --mechanism all --again",
        10,
    ),
    Question("estimate, 1b", f"estimate {_1B} --method flash-bk --batch-size 4", 2.5),
    Question(
        "estimate, rank 0 of 64, llama-3.1-8b, flash",
        f"estimate {_RANK} --method flash --parallel kind=fsdp,world_size=64",
        20,
    ),
    Question(
        "a question of the documentation", "advise --model 1b --target h200 --seq-len 1024", 0.4
    ),
    Question(
        "another price",
        f"budget {_1B} --samples 1e6 --tokens 2e9 --epsilon 8 --delta 1e-7 --price-per-hour 4.5",
        0.4,
        f"budget {_1B} --samples 1e6 --tokens 2e9 --epsilon 8 --delta 1e-7 --price-per-hour 3.5",
    ),
)
MOST_BYTES = 2**30
_EVERY_S = 0.2


class Used(NamedTuple):
    """What a command used."""

    elapsed_s: float
    held_bytes: int


def use(code: str, *arguments: str, folder: str) -> Used:
    """Run Python code in a process of its own.

    Raises:
        RuntimeError: It failed.
    """
    started = time.perf_counter()
    process = psutil.Popen(
        [sys.executable, "-c", code, *arguments],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(PACKAGE.parent)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    most = 0
    while process.poll() is None:
        most = max(most, _held(process))
        time.sleep(_EVERY_S if time.perf_counter() - started > 1 else _EVERY_S / 20)
    if process.returncode:
        raise RuntimeError(f"{arguments} ended with {process.returncode}")
    return Used(time.perf_counter() - started, most)


def _held(process: psutil.Process) -> int:
    """Return what a process and its children hold; 0 for what has just ended."""
    total = 0
    for member in (process, *process.children(recursive=True)):
        with contextlib.suppress(psutil.Error):
            total += member.memory_full_info().pss
    return total


def ask(question: Question) -> Used:
    """Ask a question in an empty folder."""
    with tempfile.TemporaryDirectory() as folder:
        if question.before:
            use(RUN, *question.before.split(), folder=folder)
        return use(RUN, *question.command.split(), folder=folder)


def main() -> None:
    """Run from the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--rounds", **at_least(1, 3))
    arguments = parser.parse_args()
    ratios: dict[str, list[float]] = {question.name: [] for question in QUESTIONS}
    held = dict.fromkeys(ratios, 0)
    for number in range(1, arguments.rounds + 1):
        bare = use(IMPORTS, folder=tempfile.gettempdir()).elapsed_s
        for question in QUESTIONS:
            name, used = question.name, ask(question)
            ratios[name].append(used.elapsed_s / bare)
            held[name] = max(held[name], used.held_bytes)
            say(f"[{number}/{arguments.rounds}] {name}: {ratios[name][-1]:.2f} imports")
    medians = {name: statistics.median(imports) for name, imports in ratios.items()}
    rows = []
    for name, _, most_imports, _ in QUESTIONS:
        imports = (medians[name], min(ratios[name]), max(ratios[name]))
        cells = [name, *(f"{number:.2f}" for number in imports), f"{most_imports:g}"]
        rows.append([*cells, f"{held[name] / 2**20:,.0f}"])
    heads = ("question", "imports, median:", "from:", "to:", "at most:", "MiB held:")
    commands = "\n".join(f"* {name}: `dpprof {command}`" for name, command, *_ in QUESTIONS)
    text = "\n".join(lay_out(heads, rows))
    place = f"{describe_place('torch', 'opacus')}; {arguments.rounds} rounds."
    publish(__doc__, f"{place}\n\n{text}\n\n{commands}", arguments.output, printed=text)
    beyond = [name for name, _, most_imports, _ in QUESTIONS if medians[name] > most_imports]
    beyond += [name for name, size in held.items() if size > MOST_BYTES]
    end(f"beyond its limit, or {MOST_BYTES:,} bytes", beyond)


if __name__ == "__main__":
    main()
