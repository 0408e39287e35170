"""Tries every causal language model of transformers, small, and writes what came out.

``python tests/verification/architectures.py`` writes docs/numbers/architectures.md and the table
that it links. With names of architectures it prints their rows and writes nothing.
"""

import csv
import multiprocessing
import os
import re
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # a fork of a process with threads may stand still

from dpprof.experiments.config.architecture import Architecture
from dpprof.experiments.config.fine_tuning import Lora
from dpprof.experiments.planning.stand_ins import StandIn
from dpprof.measure.verification.float32_islands import lift_float32
from dpprof.measure.verification.verify import verify_case

ROOT = Path(__file__).parents[2]
NUMBERS = ROOT / "docs" / "numbers"
PAGE = NUMBERS / "architectures.md"
TABLE = NUMBERS / "data" / "architectures.csv"
LIMIT_S = 30
FORK = multiprocessing.get_context("fork")
METHOD = "flash-bk"
SENTENCE = 160

HEAD = f"""# Architectures

Which causal language models of transformers does {METHOD} train correctly? [The
table](data/architectures.csv) has a row for each architecture: whole, and with adapters on all
linear layers (LoRA).

"""

TAIL = """
Each is built small from its default config. Its clipped gradient is compared with [the
references](verified.md) in float64, in batches of 4 with `sdpa`, if the architecture has it.

* verified: the relative error is at most 1e-9, in two steps.
* refused: an error, which in most cases names the part that cannot be clipped. Nothing was
  computed.
* failed: the gradient differs from the reference's.
* no reference: the model itself does not run on a CPU, or not correctly in float64.
* not built: transformers builds no small model of this kind from its defaults, or the model is no
  causal decoder of text. That says nothing about the method.

`python tests/verification/architectures.py` writes this page and the table. The list of
architectures is transformers' own; nobody selected from it.
"""


def try_one(kind: str) -> tuple[str, str]:
    """Return what became of an architecture: whole, and with adapters."""
    model = Architecture(hf=kind, model_type=kind, task="causal-lm")
    adapters = Lora(rank=2, target_modules="all-linear")
    return judge(StandIn(model=model)), judge(StandIn(model=model, lora=adapters))


def judge(stand_in) -> str:
    """Return what became of a model in a few words."""
    with lift_float32():
        case = verify_case(stand_in, METHOD, "sdpa", 4)
    if case.outcome == "passed":
        return "verified"
    reason = " ".join((case.reason or "").split())
    if case.outcome == "unknown":
        return f"no reference: {shorten(reason.removeprefix('no reference: '))}"
    if case.outcome == "unsupported":
        refused = case.max_grad_norm is not None
        return f"{'refused' if refused else 'not built'}: {shorten(reason)}"
    if re.match(r"relative error|the gradient|its |\d+ of ", reason):
        return f"failed: {shorten(reason)}"
    return f"refused: {shorten(reason)}"


def shorten(text: str) -> str:
    """Return the beginning of a sentence, for a table's cell."""
    text = text.replace("|", "/").replace("\n", " ").replace("<", "(").replace(">", ")")
    return text if len(text) <= SENTENCE else text[:SENTENCE].rsplit(" ", 1)[0] + " ..."


def run_apart(kind: str) -> tuple[str, str]:
    """Try an architecture in a process of its own, which may hang or crash."""
    ours, theirs = FORK.Pipe()
    process = FORK.Process(target=lambda: theirs.send(try_one(kind)))
    process.start()
    theirs.close()
    late = f"not built: no answer within {LIMIT_S} s"
    try:
        return ours.recv() if ours.poll(LIMIT_S) else (late, late)
    except EOFError:
        process.join()
        ended = f"not built: its process ended with {process.exitcode}"
        return ended, ended
    finally:
        process.kill()
        process.join()


def list_kinds() -> list[str]:
    """Return every architecture that transformers calls a causal language model."""
    from transformers.models.auto import modeling_auto  # noqa: PLC0415

    return sorted(modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def write_page(rows: dict[str, tuple[str, str]]) -> None:
    """Write the page, how many came out how, and the table, a row for each."""
    import peft  # noqa: PLC0415
    import torch  # noqa: PLC0415
    import transformers  # noqa: PLC0415

    def count(start: str, at: int) -> int:
        return sum(row[at].startswith(start) for row in rows.values())

    kinds = ("verified", "refused", "failed", "no reference", "not built")
    summary = (
        f"Of {len(rows)} architectures of transformers {transformers.__version__}, with torch "
        f"{torch.__version__.partition('+')[0]} and peft {peft.__version__}:"
    )
    lines = [
        summary,
        "",
        "| | whole | LoRA |",
        "| --- | ---: | ---: |",
        *(f"| {kind} | {count(kind, 0)} | {count(kind, 1)} |" for kind in kinds),
    ]
    PAGE.write_text(HEAD + "\n".join(lines) + "\n" + TAIL, encoding="utf-8")
    with TABLE.open("w", encoding="utf-8", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("architecture", "whole", "lora"))
        table.writerows((kind, *row) for kind, row in rows.items())


def main() -> None:
    """Run from the command line."""
    if sys.argv[1:]:
        for kind in sys.argv[1:]:
            print("ROW", *try_one(kind), sep="|", flush=True)
        return
    rows = {}
    try_one("llama")  # imports what every process needs, once

    for kind in list_kinds():
        rows[kind] = run_apart(kind)
        print(kind, *rows[kind], sep=" | ", flush=True)
    write_page(rows)


if __name__ == "__main__":
    main()
