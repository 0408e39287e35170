"""LoRA as fitcheck-llm measured it on a T4, and what is predicted for each run.

``python -m published.finetuning`` prints the table of docs/validation.md.
"""

import json
from functools import cache
from typing import Any, NamedTuple

from published.cases import DATA
from published.programs.hugging_face import training
from published.recording import Recording, record

from dpprof.spec import registry

_CONTENT = json.loads((DATA / "finetuning.json").read_text())
_STEPS = 2
_PHASES = {"forward": "backward", "backward": "optimizer", "optimizer": "stepped"}
"""The marks at which phases begin and end."""

_LORA = {"rank": 32, "alpha": 64, "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}
_BASES: dict[str, dict[str, Any]] = {
    "float16": {"dtype": "float16", "parameters_dtype": "float16", "autocast": False},
}
"""What an experiment says of the frozen model, by its name in the data."""

HEADER = """\
| model | base | attention | B x T | peak, MiB | predicted | difference | forward | backward \
| optimizer | reserved, MiB | predicted | difference |
| --- | --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"""


@cache
def _record(run: str) -> Recording:
    one = next(one for one in RUNS if one.id == run)
    attention = "eager" if one.attention == "eager" else "sdpa"
    sizes = {"batch_size": one.batch_size, "seq_len": one.seq_len}
    model = _CONTENT["models"][one.model]
    target = registry.load("targets", "t4")
    fields = {**_BASES[one.base], "model": model, "lora": _LORA, "attention": attention}
    return record(training, target, steps=_STEPS, **sizes, **fields)


class Run(NamedTuple):
    """What one run on a T4 showed; MiB."""

    id: str
    model: str
    base: str
    attention: str
    batch_size: int
    seq_len: int
    measured: dict[str, float]
    """Peaks of allocated memory in each phase, and what was reserved."""

    @property
    def predicted(self) -> dict[str, float]:
        """The same, predicted."""
        recording = _record(self.id)
        peaks = {phase: recording.peak("allocated", phase, end) for phase, end in _PHASES.items()}
        return {**peaks, "reserved": recording.at("reserved")}

    @property
    def differences(self) -> dict[str, float]:
        """By how many percent each prediction differs, and that of the peak."""
        predicted = self.predicted
        found = {name: 100 * (predicted[name] / was - 1) for name, was in self.measured.items()}
        return {**found, "peak": 100 * (_peak(predicted) / _peak(self.measured) - 1)}

    @property
    def line(self) -> str:
        """The run in the table."""
        was, now, differs = self.measured, self.predicted, self.differences
        told = {name: f"{value:+.3f} %" for name, value in differs.items()}
        phases = " | ".join(told[phase] for phase in _PHASES)
        return (
            f"| {self.model} | {self.base} | {self.attention} | {self.batch_size} x "
            f"{self.seq_len:,} | {_peak(was):,.1f} | {_peak(now):,.1f} | {told['peak']} | {phases} "
            f"| {was['reserved']:,.0f} | {now['reserved']:,.0f} | {told['reserved']} |"
        )


def _peak(of_phases: dict[str, float]) -> float:
    return max(of_phases[phase] for phase in _PHASES)


QUICK = "t4-sweep-2026-09-15/39"
"""A run that is recorded quickly."""

RUNS = [Run(**fields) for fields in _CONTENT["runs"]]

if __name__ == "__main__":
    print(HEADER, *(run.line for run in RUNS), sep="\n")
