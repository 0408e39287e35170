"""Writes docs/validation.md: every published case beside what is predicted for it.

Run ``PYTHONPATH=src:tests python tests/published/page.py`` from the repository's root.
"""

from collections.abc import Iterable
from pathlib import Path

from published.cases import CASES, SOURCES, Case
from published.replays import REPLAYS, Replay

PAGE = Path(__file__).parents[2] / "docs" / "validation.md"
_MIB = 2**20
_LIMITS = 0.01, 0.1, 0.5, 2.0
EXPLAINED_FROM = 0.5
_COUNTERS = {"rounded": "requested", "allocated": "allocated", "reserved": "reserved"}
_EXACT = 5e-4
"""Percent below which no difference is shown."""

_HEAD = """\
# Predictions against published measurements

dpprof predicts what a training step takes on a CUDA device without running it there. This page
compares such predictions with what others measured on their GPUs and published. Each case is a
small program of our own, written from the settings that the source states, and recorded as an
estimate records a training. The programs and the published numbers are in
[tests/published](../tests/published); a test fails where this page differs from what is computed.
"""

_COUNTERS_TEXT = """\
## What is counted

* **requested**: sizes that were asked for, each rounded up to 512 bytes. Snapshots of memory give
  them event by event.
* **allocated**: whole blocks of the caching allocator (`torch.cuda.memory_allocated`, and its peak
  `max_memory_allocated`). In blocks above 1 MiB a remainder of up to 1 MiB stays unused.
* **reserved**: the segments that the allocator holds (`torch.cuda.memory_reserved`).

Requested bytes are what is recorded. Allocated and reserved bytes are what the simulated allocator
does with them, from an empty process on. PyTorch's version here is newer than in most sources.
"""

_TITLES = {
    "attention": "Eager attention, forward",
    "operators": "Operators in plain PyTorch",
    "llama_like": "A transformer with RMSNorm, SwiGLU and rotary positions",
    "llama_like_small": "Another one of that kind, small, from an empty process",
    "mini_gpt": "A GPT with dropout",
    "gpt2": "GPT-2: reserved memory from an empty process",
    "small": "Linear layers and softmax",
    "opacus_layers": "Two linear layers with Opacus",
}

_NOTES = {
    "attention": "Allocated after a forward pass that follows a backward pass. The batch is 8.",
    "operators": "The peak of the third run of an operator, forward and backward unless the "
    "row says otherwise. Of the tables of embeddings one number each is fitted: what earlier "
    "benchmarks of the same process had left behind (12,240 MiB and 13,770 MiB).",
    "llama_like": "Vocabulary 10,000. The peak of a step that follows others; allocated and "
    "reserved after it.",
    "llama_like_small": "4 layers, D 512, B 10, vocabulary 10,000. The peak of three steps, from "
    "the first allocation on.",
    "mini_gpt": "The peak of a step, and what is reserved after it.",
    "gpt2": "124 million parameters, B 8, T 1,024; each row changes one thing more. The source "
    "trains an epoch; the program trains two steps with an evaluation after the first, and "
    "generates three tokens. What is reserved no longer grows after the first step.",
    "small": "The peak of the process.",
    "opacus_layers": "5,120 to 2,560 to 1,280. The increase of the peak by stage.",
}


def render() -> str:
    """Compose the page."""
    families = {title: [c for c in CASES if c.family == name] for name, title in _TITLES.items()}
    parts = [_HEAD, _summarise(CASES), _COUNTERS_TEXT]
    for (name, title), cases in zip(_TITLES.items(), families.values(), strict=True):
        parts.append(f"## {title}\n\n{_wrap(_NOTES[name])}\n")
        parts += [_list_sources(cases), _table(cases), _explain(cases)]
    parts.append(_tell_replays())
    parts += [_INFERRED, _OURS, _NOT_COVERED]
    parts.append("\n".join(f"[{name}]: {source.url}" for name, source in SOURCES.items()) + "\n")
    return "\n".join(part for part in parts if part)


def row(case: Case) -> str:
    """Write a case's line of the table."""
    digits = 4 if case.unit == "GiB" else 3
    values = f"{case.published:,.{digits}f} | {case.predict():,.{digits}f}"
    source = SOURCES[case.source]
    return (
        f"| {case.label} | {_COUNTERS[case.counter]} | {values} | {case.unit} "
        f"| {percent(case.difference())} | [{source.name}][{case.source}] |"
    )


def row_of_replay(replay: Replay) -> str:
    """Write a snapshot's line of the table."""
    pairs = zip(replay.published, replay.play(), strict=True)
    end, reserved = (
        f"{was / _MIB:,.2f} | {simulated / _MIB:,.2f} | {percent(100 * (simulated / was - 1))}"
        for was, simulated in pairs
    )
    return f"| [{replay.label}]({replay.url}) | {end} | {reserved} |"


def percent(difference: float) -> str:
    """Write a difference."""
    return "0" if abs(difference) < _EXACT else f"{difference:+.3f} %"


def _summarise(cases: Iterable[Case]) -> str:
    differences = [abs(case.difference()) for case in cases]
    counts = [sum(one <= limit for one in differences) for limit in _LIMITS]
    within = ", ".join(
        f"{count} within {limit:g} %" for count, limit in zip(counts, _LIMITS, strict=True)
    )
    return (
        _wrap(f"**Of {len(differences)} published numbers, predictions agree: {within}.**") + "\n"
    )


def _list_sources(cases: Iterable[Case]) -> str:
    names = dict.fromkeys(case.source for case in cases)
    return (
        "\n".join(
            _wrap(
                f"* [{SOURCES[name].name}][{name}]: GPU {SOURCES[name].gpu}; "
                f"PyTorch {SOURCES[name].torch}",
                "  ",
            )
            for name in names
        )
        + "\n"
    )


def _table(cases: Iterable[Case]) -> str:
    head = "| settings | counter | published | predicted | unit | difference | source |\n"
    return (
        head
        + "| --- | --- | ---: | ---: | --- | ---: | --- |\n"
        + "\n".join(map(row, cases))
        + "\n"
    )


def _explain(cases: Iterable[Case]) -> str:
    told = [
        _wrap(f"* {case.label}, {_COUNTERS[case.counter]}: {case.why or case.note}", "  ")
        for case in cases
        if case.why or case.note
    ]
    return "\n".join(told) + "\n" if told else ""


def unexplained(cases: Iterable[Case]) -> list[str]:
    """List the cases that differ by much, and say nothing of why."""
    return [case.id for case in cases if abs(case.difference()) > EXPLAINED_FROM and not case.why]


def _tell_replays() -> str:
    head = (
        "| snapshot | allocated, published | simulated | difference "
        "| reserved, published | simulated | difference |\n"
    )
    rule = "| --- | ---: | ---: | ---: | ---: | ---: | ---: |\n"
    return _REPLAYS_TEXT + "\n" + head + rule + "\n".join(map(row_of_replay, REPLAYS)) + "\n"


def _wrap(text: str, indent: str = "") -> str:
    """Break lines at 100 characters."""
    lines, line = [], ""
    for word in text.split():
        if line and len(line) + 1 + len(word) > _WIDTH:
            lines.append(line)
            line = indent + word
        else:
            line = f"{line} {word}" if line else word
    return "\n".join([*lines, line])


_WIDTH = 100

_REPLAYS_TEXT = """\
## Snapshots, played through the simulated allocator

Here the events are the GPU's own: what was allocated and freed in one training step. The peak of
their requested sizes is the published one to the byte, in all four.

The snapshots begin within a training, so what was there before has a known total but no known
places. It is put together from cuBLAS's workspaces, parameters, gradients or optimizer state, and
from what the step frees; that explains the total but for the inputs, in all four. The step is
played five times, as the training had run steps before. Places still depend on the order in which
all that was allocated, so these differences are not the simulation's: from an empty process, the
program above gives the first snapshot's 1,313.93 and 13,524 MiB exactly.
"""

_INFERRED = """\
## What was read off the numbers

A source does not say everything. These choices were made because the published numbers ask for
them, so they are no evidence by themselves:

* the kind of GPU where it is not named, from the size of cuBLAS's workspaces;
* what earlier benchmarks of the same process left behind: one number for each table of embeddings,
  and the workspaces under GEGLU and SwiGLU;
* second modules in Liger's benchmarks, which its later versions no longer make;
* that the layers of Opacus's blog have no biases, and that its SGD holds the logits in a variable;
* that in the GPT with dropout the logits of the step before are gone;
* how many steps went before, where a source does not say.

What variables hold tensors, and for how long, follows the sources' code. It decides a good part of
a peak: one variable that holds logits is one tensor of logits more.
"""

_OURS = """\
## Measured by us

We ran 28 steps of our presets, and of SmolLM2-135M, on an H100 and an H200 with PyTorch 2.11, and
compared them with what `dpprof estimate` says without a GPU: [every
row](../perf/measured_steps.md). The predicted peak of allocated memory is within 0.004 % for the 19
steps of `1b`, and within 0.47 % for all; reserved memory is within 1.3 %, but for one.

* Of most steps 1 MiB was missing: before PyTorch 2.13, cuBLASLt, which adds biases, has a workspace
  of its own. It is modelled now; the rows are predictions by PyTorch 2.13, which has none.
* What is left are blocks of the allocator's cache that are larger than what was asked for. Reserved
  memory of one step was 9.5 % higher than predicted (`medium`, opacus-hooks); we have not found
  why.
* **The largest batch.** `dpprof advise --model 1b --methods flash-bk --dtype bfloat16 --seq-len
  1024 --target h100` says that 28 samples fit in 80,479 MiB, that 29 do not because free memory is
  in pieces too small, and that by size 30 would. On the H100, limited to as much, 28 samples ran,
  with the predicted peak of 74,737 MiB (+1); 29 and 31 ran out of memory, with 4.6 and 5.6 GiB
  reserved but free.
"""

_NOT_COVERED = """\
## What no published number covers

None of the built-in presets was measured by anybody else. The methods `flash` and `flash-bk`, the
backward pass of flash attention in bfloat16 by itself, and cuDNN's attention have no published
number. So they rest on the sources that [the estimate's page](numbers/estimate.md#for-a-gpu) names,
and on our runs above.
"""


if __name__ == "__main__":
    PAGE.write_text(render())
    print(f"wrote {PAGE}")
