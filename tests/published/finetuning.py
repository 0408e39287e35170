"""Fine-tuning as others measured it on a T4 and an A100, and what is predicted for each run.

``python -m published.finetuning`` prints the tables of docs/validation.md.
"""

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from published.cases import DATA
from published.programs.hugging_face import trainer, training
from published.recording import Recording, record, record_step

from dpprof.spec import registry
from dpprof.step_time.predict import predict_step

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

TRAINER_HEADER = """\
| model | trained | B x T | peak, MiB | predicted | difference | step, s | predicted | difference |
| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |"""
_ADAPTERS = "rank=16,alpha=16,dropout=0.1,target_modules=q_proj+k_proj+v_proj+o_proj"


@cache
def _record_trainer(run: "TrainerRun") -> tuple[float, float]:
    """Return the predicted peak in MiB, and the seconds of a step."""
    target = registry.load("targets", "a100")
    in_short = {"dtype": "bfloat16", "parameters_dtype": "bfloat16", "autocast": False}
    adapters = {"lora": _ADAPTERS} if run.trained == "LoRA" else {"trained_dtype": "bfloat16"}
    with TemporaryDirectory() as folder:
        config = Path(folder, "config.json")
        config.write_text(json.dumps(_CONTENT["trainer_models"][run.model]))
        settings: dict[str, Any] = {
            "loss": run.loss,
            "batch_size": run.batch_size,
            "seq_len": run.seq_len,
            "model": f"hf:{config}",
            **in_short,
            **adapters,
        }
        peak = record(trainer, target, **settings).peak("allocated", "last step")
        step = predict_step(record_step(trainer, target, **settings), "bfloat16", target)
    return peak, step.median


class TrainerRun(NamedTuple):
    """What one run of transformers' Trainer on an A100 showed."""

    id: str
    model: str
    loss: str
    trained: str
    batch_size: int
    seq_len: int
    peak: float
    """MiB."""

    seconds: float
    """Of a step."""

    @property
    def differences(self) -> tuple[float, float]:
        """By how many percent the predicted peak differs, and the time of a step."""
        peak, seconds = _record_trainer(self)
        return 100 * (peak / self.peak - 1), 100 * (seconds / self.seconds - 1)

    @property
    def line(self) -> str:
        """The run in the table."""
        peak, seconds = _record_trainer(self)
        of_peak, of_time = self.differences
        return (
            f"| {self.model} | {self.trained} | {self.batch_size} x {self.seq_len:,} "
            f"| {self.peak:,.1f} | {peak:,.1f} | {of_peak:+.3f} % | {self.seconds:.3f} "
            f"| {seconds:.3f} | {of_time:+.1f} % |"
        )


TRAINER_RUNS = [TrainerRun(**fields) for fields in _CONTENT["trainer_runs"]]

if __name__ == "__main__":
    print(HEADER, *(run.line for run in RUNS), sep="\n")
    print(TRAINER_HEADER, *(run.line for run in TRAINER_RUNS), sep="\n")
