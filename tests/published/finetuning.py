"""Fine-tuning as others measured it on a T4 and an A100, and what is predicted for each run.

``python -m published.finetuning`` prints the tables in docs/numbers/data.
"""

import csv
import json
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

from published.programs.hugging_face import trainer, training
from published.recording import DATA, record

from dpprof.experiments.config import registry
from dpprof.predict.step_time.predict import predict_step

_CONTENT = json.loads((DATA / "finetuning.json").read_text())
_STEPS = 2
_PHASES = {"forward": "backward", "backward": "optimizer", "optimizer": "stepped"}
"""The marks at which phases begin and end."""

_TARGETS = "q_proj+k_proj+v_proj+o_proj"
_BASES: dict[str, dict[str, Any]] = {
    "float16": {"dtype": "float16", "parameters_dtype": "float16", "autocast": False},
    "nf4": {"dtype": "float16", "quantization": "nf4"},
}
"""What an experiment says of the frozen model, by its name in the data."""


@cache
def _predict(run: str) -> dict[str, float]:
    """Predict the peaks of a run's phases, what it reserves, and the seconds of a step."""
    named = next(named for named in RUNS if named.id == run)
    attention = "eager" if named.attention == "eager" else "sdpa"
    sizes = {"batch_size": named.batch_size, "seq_len": named.seq_len}
    lora = f"rank={named.rank},target_modules={_TARGETS}"
    fields = {"model": _CONTENT["models"][named.model], "lora": lora, "attention": attention}
    target = registry.load("targets", "t4")
    recording = record(training, target, steps=_STEPS, **sizes, **_BASES[named.base], **fields)
    peaks = {phase: recording.peak("allocated", phase, end) for phase, end in _PHASES.items()}
    step = predict_step(recording.ops, "float16", target)
    peaks |= {"peak": max(peaks.values()), "reserved": recording.at("reserved")}
    return peaks | {"seconds": step.median, "low": step.low, "high": step.high}


class Run(NamedTuple):
    """What one run on a T4 showed."""

    id: str
    model: str
    base: str
    attention: str
    rank: int
    batch_size: int
    seq_len: int
    measured: dict[str, float]
    """MiB: the peak of allocated memory, in each phase where that was read, and what was reserved;
    and the seconds of a step, where that was measured."""

    @property
    def predicted(self) -> dict[str, float]:
        """The same, predicted; with the ends of the interval of seconds, ``low`` and ``high``."""
        return _predict(self.id)

    @property
    def differences(self) -> dict[str, float]:
        """By how many percent each prediction differs."""
        now = self.predicted
        return {name: 100 * (now[name] / was - 1) for name, was in self.measured.items()}

    @property
    def row(self) -> dict[str, str]:
        """The run in the table."""
        was, now = self.measured, self.predicted
        differs = {name: f"{value:+.3f}" for name, value in self.differences.items()}
        is_timed = "seconds" in was
        return {
            "model": self.model,
            "base": self.base,
            "attention": self.attention,
            "batch": f"{self.batch_size} x {self.seq_len}",
            "peak_mib": f"{was['peak']:.1f}",
            "predicted_peak_mib": f"{now['peak']:.1f}",
            "peak_difference_percent": differs["peak"],
            **{f"{phase}_difference_percent": differs.get(phase, "") for phase in _PHASES},
            "reserved_mib": f"{was['reserved']:.0f}",
            "predicted_reserved_mib": f"{now['reserved']:.0f}",
            "reserved_difference_percent": differs["reserved"],
            "step_s": f"{was['seconds']:.2f}" if is_timed else "",
            "predicted_step_s": f"{now['seconds']:.2f}" if is_timed else "",
            "step_difference_percent": f"{self.differences['seconds']:+.0f}" if is_timed else "",
        }


QUICK = "t4-sweep-2026-09-15/39"
"""A run that is recorded quickly."""

RUNS = [Run(**fields) for fields in _CONTENT["runs"]]

_ADAPTERS = f"rank=16,alpha=16,dropout=0.1,target_modules={_TARGETS}"
_TRAINED: dict[str, dict[str, Any]] = {
    "all": {"parameters_dtype": "bfloat16", "autocast": False, "trained_dtype": "bfloat16"},
    "LoRA": {"parameters_dtype": "bfloat16", "autocast": False, "lora": _ADAPTERS},
    "QLoRA": {"quantization": "nf4-double", "lora": _ADAPTERS},
}
"""What an experiment says of the model, by what the data says of what is trained."""


@cache
def _record_trainer(run: "TrainerRun") -> tuple[float, float]:
    """Return the predicted peak in MiB, and the seconds of a step."""
    target = registry.load("targets", "a100")
    with TemporaryDirectory() as folder:
        config = Path(folder, "config.json")
        config.write_text(json.dumps(_CONTENT["trainer_models"][run.model]))
        settings: dict[str, Any] = {
            "loss": run.loss,
            "batch_size": run.batch_size,
            "seq_len": run.seq_len,
            "model": f"hf:{config}",
            "dtype": "bfloat16",
            **_TRAINED[run.trained],
        }
        recording = record(trainer, target, **settings)
    step = predict_step(recording.ops, "bfloat16", target)
    return recording.peak("allocated", "last step"), step.median


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
    def row(self) -> dict[str, str]:
        """The run in the table."""
        peak, seconds = _record_trainer(self)
        of_peak, of_time = self.differences
        return {
            "model": self.model,
            "trained": self.trained,
            "batch": f"{self.batch_size} x {self.seq_len}",
            "peak_mib": f"{self.peak:.1f}",
            "predicted_peak_mib": f"{peak:.1f}",
            "peak_difference_percent": f"{of_peak:+.3f}",
            "step_s": f"{self.seconds:.3f}",
            "predicted_step_s": f"{seconds:.3f}",
            "step_difference_percent": f"{of_time:+.1f}",
        }


TRAINER_RUNS = [TrainerRun(**fields) for fields in _CONTENT["trainer_runs"]]

if __name__ == "__main__":
    for rows in ([run.row for run in RUNS], [run.row for run in TRAINER_RUNS]):
        table = csv.DictWriter(sys.stdout, list(rows[0]), lineterminator="\n")
        table.writeheader()
        table.writerows(rows)
