"""What all tables share: key columns, axis columns, and columns that exist without rows."""

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from dpprof.planning.planner import PlannedRun
from dpprof.spec.experiment import Experiment
from dpprof.spec.validation import InputError

_PATIENCE = {"timeout_s", "wait_for_idle_gpu_s"}
RUN_KEY = ["experiment_id", "instrument", "replicate"]
AXES = [name for name in Experiment.model_fields if name not in _PATIENCE]
"""The columns that distinguish experiments; timeouts and waiting times do not."""

BASELINE = "standard"
NOT_IN_BASELINE = {"method", "max_grad_norm", "noise_multiplier"}
"""The axes that the non-private step does not depend on."""

SETTING = [name for name in AXES if name not in NOT_IN_BASELINE]
"""The axes that must be equal for methods to be compared."""

_TEXTS = {
    *("experiment_id", "instrument", "sweeps", "model", "method", "dtype", "optimizer"),
    *("attention", "device", "target", "outcome", "error_kind", "error_phase", "error_message"),
    *("error_log", "started_at", "device_name", "hostname", "python", "torch", "opacus"),
    *("git_commit", "code_digest", "peak_kind", "stage", "name", "phase", "component"),
    *("snapshot", "layer", "path", "kind", "finding", "step_verdict"),
    *("op", "module", "function", "evidence", "reason", "by", "key"),
    *(
        "op_kind",
        "bound",
        "trace",
        "ceilings_of",
        "peak_source",
        "utilisation_reason",
        "figure",
        "source",
    ),
    *("verdict", "limited_by", "message", "reference", "mechanism", "holes"),
    *("smallest", "fastest", "fastest_verdict", "not_slower"),
}


def make_frame(rows: Iterable[dict[str, Any]], columns: list[str]) -> pd.DataFrame:
    """Return a frame that has its columns even without rows."""
    return pd.DataFrame(list(rows), columns=pd.Index(columns))


def read_table(path: Path) -> pd.DataFrame:
    """Read a table from a CSV file; a text such as ``null`` or ``12`` stays a text.

    Raises:
        InputError: The file is not a table; the message names it.
        OSError: It cannot be read.
    """
    try:
        columns = pd.read_csv(path, nrows=0).columns
        texts = dict.fromkeys(_TEXTS.intersection(columns), str)
        return pd.read_csv(path, dtype=texts, keep_default_na=False, na_values=[""])
    except ValueError as error:
        raise InputError(f"{path}: is not a table ({error})") from None


class TableFolder(Mapping[str, pd.DataFrame]):
    """The tables of a folder of CSV files, by stem; each is read on first use."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read: dict[str, pd.DataFrame] = {}

    def __getitem__(self, name: str) -> pd.DataFrame:
        if name not in self._read:
            self._read[name] = read_table(self._folder / f"{name}.csv")
        return self._read[name]

    def __iter__(self) -> Iterator[str]:
        return iter(sorted(path.stem for path in self._folder.glob("*.csv")))

    def __len__(self) -> int:
        return len(list(iter(self)))


def varying_axes(experiments: pd.DataFrame, but: Iterable[str]) -> list[str]:
    """Return the axes, except those in ``but``, in which the experiments of a table differ."""
    there = [name for name in AXES if name in experiments and name not in set(but)]
    return [name for name in there if len(set(experiments[name].map(str))) > 1]


def key_of(run: PlannedRun) -> dict[str, Any]:
    """Return a run's key as columns."""
    return {"experiment_id": run.id, "instrument": run.instrument, "replicate": run.replicate}


def axes_of(experiment: Experiment) -> dict[str, Any]:
    """Return an experiment's axes as columns."""
    fields = experiment.model_dump(mode="json")
    spelled = {"model": _model_text(experiment), "target": target_text(experiment)}
    return {name: fields[name] for name in AXES} | spelled


def target_text(experiment: Experiment) -> str | None:
    """Return the target's name; for a mapping its main figures, as ``24GiB-100TF-2TBps``."""
    target = experiment.target
    if target is None or isinstance(target, str):
        return target
    fastest = max(target.flops_per_s.values()) / 1e12
    bandwidth = target.bandwidth_bytes_per_s / 1e12
    return f"{target.memory_bytes / 2**30:.4g}GiB-{fastest:.4g}TF-{bandwidth:.3g}TBps"


def _model_text(experiment: Experiment) -> str:
    """Return the model's name; for a mapping its dimensions, as ``V1000-d64-L2-H4``."""
    model = experiment.model
    if isinstance(model, str):
        return model
    return f"V{model.vocab_size}-d{model.d_model}-L{model.layers}-H{model.heads}"
