"""A run of one's own beside its prediction: how far off it is, what may explain that, and its rows.

A difference is looked for in the training loop (what its loss computes in, the logits that it
keeps), in reserved memory, which fragments, and in workspaces that only libraries know.
"""

import csv
import io
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from dpprof.ask.predictions import predict
from dpprof.experiments.config import registry
from dpprof.experiments.config.architecture import PREFIX, Architecture, resolve
from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.loops import LOOPS
from dpprof.experiments.config.naming import is_code
from dpprof.experiments.config.quantities import Positive, Size
from dpprof.experiments.config.validation import InputError, explain, option_name, spell
from dpprof.experiments.records.result import Result, result_path
from dpprof.experiments.records.step_costs import find_unknown_workspaces
from dpprof.system.files import check_writable, write_atomically

COLUMNS = (
    *("id", "page", "source", "gpu", "target", "model", "method", "settings"),
    *("quantity", "value", "unit", "read_from", "not_predicted"),
)
"""Of ``perf/evidence.csv``."""

_GIB = 2**30
_NEAR = 0.01
"""A peak that is as near as this share needs no explanation."""

_DECIDES = ("loss", "loss_dtype", "keep_logits", "use_cache")


class Measured(BaseModel, frozen=True):
    """What a user measured of an experiment."""

    measured_peak: Size | None = None
    """Most bytes of allocated memory, ``torch.cuda.max_memory_allocated()``."""

    measured_step: Positive | None = None
    """Seconds of a step."""

    @classmethod
    def read(cls, peak: Any, step: Any) -> "Measured | None":
        """Return what was measured; None for nothing.

        Raises:
            InputError: It is no number of bytes, or of seconds.
        """
        try:
            read = cls(measured_peak=peak, measured_step=step)
        except ValidationError as error:
            raise explain(error, cls, options=True) from None
        return None if (peak, step) == (None, None) else read

    def check(self, experiment: Experiment, rows: Path) -> None:
        """Raise ``InputError`` where rows cannot be predicted again, or their file is no table."""
        option = "measured_peak" if self.measured_peak is not None else "measured_step"
        if not isinstance(experiment.target, str) or experiment.device != "cuda":
            raise InputError(f"{spell(option)}: requires {spell('target')}, the name of a GPU")
        if is_code(experiment.model) or registry.is_lent(experiment.model):
            raise InputError(f"{spell(option)}: requires a model with a name, and not code")
        check_writable(rows)
        _read_rows(rows)


def compare(result: Result, measured: Measured) -> list[str]:
    """Say how far a prediction is off, and what would explain it; predicts other loops."""
    lines = []
    if measured.measured_peak is not None:
        lines += _compare_peak(result, int(measured.measured_peak))
    step = result.time and result.time.predicted_step_s
    if measured.measured_step is not None and not step:
        lines.append("measured a step, of which no time is predicted")
    elif measured.measured_step is not None and step:
        off = measured.measured_step / step.median - 1
        is_inside = step.low <= measured.measured_step <= step.high
        lines.append(
            f"measured {measured.measured_step * 1e3:,.1f} ms a step, {_more(off)} than predicted, "
            f"{'inside' if is_inside else 'outside'} the 90 % interval"
        )
        if not is_inside:
            lines.append(
                f"        the host is waited for in {step.waiting_share:.0%} of the predicted "
                "step; loading of data and logging are not in it"
            )
    return lines


def _more(share: float) -> str:
    return f"{abs(share):.1%} {'more' if share >= 0 else 'less'}"


def _compare_peak(result: Result, peak_bytes: int) -> list[str]:
    memory = result.memory
    assert memory is not None
    assert memory.peak_allocated_bytes is not None
    gap = peak_bytes - memory.peak_allocated_bytes
    off = gap / memory.peak_allocated_bytes
    said = f"measured {peak_bytes / _GIB:.2f} GiB at the peak, {_more(off)} than predicted"
    lines = [f"{said} ({abs(gap) / _GIB:.2f} GiB)"]
    if abs(off) <= _NEAR:
        return lines
    cases: dict[int, list[str]] = {}
    for explained, case in _explain(result):
        if abs(explained - peak_bytes) < abs(gap) / 2:
            cases.setdefault(explained, []).append(case)
    for explained, same in sorted(cases.items(), key=lambda item: abs(item[0] - peak_bytes)):
        rest = _more(peak_bytes / explained - 1)
        lines.append(f"        {explained / _GIB:.2f} GiB, {rest} measured: {', or '.join(same)}")
    if not cases:
        lines.append(
            "        no other loss, kept logits or reserved memory explain it: look at the "
            "optimizer, checkpointing, the longest sample, and at what else the peak contains, "
            "such as evaluation or loading"
        )
    unknown = find_unknown_workspaces(memory.assumed)
    if unknown and gap > 0:
        lines.append(f"        workspaces of which only a part is counted: {', '.join(unknown)}")
    return lines


def _explain(result: Result) -> Iterator[tuple[int, str]]:
    """Yield peaks in bytes, and in which case they are predicted."""
    memory, experiment = result.memory, result.experiment
    if memory is not None and memory.allocator is not None:
        reserved = memory.allocator.reserved_bytes
        yield reserved, "what is reserved, with fragments, which nvidia-smi shows"
    for fields in _list_loops(experiment):
        other = Experiment.model_validate(experiment.model_dump(mode="json") | fields)
        file = result_path(Path(), "estimate", other.id, 0)
        predicted = predict(other, "estimate", file, keep=True)
        if predicted.memory is not None and predicted.memory.peak_allocated_bytes is not None:
            options = [f"{option_name(key)} {value}" for key, value in fields.items() if value]
            yield predicted.memory.peak_allocated_bytes, " ".join(options)


def _list_loops(experiment: Experiment) -> Iterator[dict[str, Any]]:
    """Yield what an experiment would say of each loop with other settings than its own."""
    unsaid = dict.fromkeys(_DECIDES)
    cases: list[dict[str, Any]] = [{"loss_dtype": "logits"}, {"keep_logits": "next-forward"}]
    seen = {tuple(getattr(experiment, name) for name in _DECIDES)}
    for fields in (*cases, *(unsaid | {"loop": name} for name in LOOPS)):
        try:
            other = Experiment.model_validate(experiment.model_dump(mode="json") | fields)
        except ValidationError:  # the model or the task has no such loss
            continue
        settings = tuple(getattr(other, name) for name in _DECIDES)
        if settings not in seen:
            seen.add(settings)
            yield fields


def list_rows(
    experiment: Experiment, values: Mapping[tuple[str, str], Any], **fields: str
) -> list[dict[str, str]]:
    """Return the rows of a measured experiment, as ``perf/validate.py`` takes them.

    Args:
        experiment: What was measured.
        values: Numbers by quantity and unit; None for one that there is not.
        fields: Other columns: ``id``, ``source``, ``gpu``, ``target``, ``read_from``.
    """
    left_out = {"model", "method", "device", "target"}
    settings = experiment.model_dump(mode="json", exclude_defaults=True, exclude=left_out)
    of_loop = LOOPS[experiment.loop]._asdict()
    settings = {key: value for key, value in settings.items() if of_loop.get(key, ...) != value}
    model = experiment.model
    name = f"{PREFIX}{model.hf}" if isinstance(model, Architecture) else str(model)
    if not isinstance(model, str) and not _is_known(name, model):
        name, settings["model"] = experiment.model_name, experiment.model_dump(mode="json")["model"]
    text = yaml.safe_dump(settings, default_flow_style=True, width=math.inf, sort_keys=False)
    shared = dict.fromkeys(COLUMNS, "") | {
        **fields,
        "page": "measured_steps",
        "model": name,
        "method": experiment.method,
        "settings": text.strip()[1:-1],
    }
    return [
        shared | {"quantity": quantity, "unit": unit, "value": str(value)}
        for (quantity, unit), value in values.items()
        if value is not None
    ]


def _is_known(name: str, model: Any) -> bool:
    """Tell whether a model's name alone says what it is."""
    try:
        return bool(Architecture.model_validate(resolve(name)) == model)
    except ValueError:
        return False


def write_rows(path: Path, result: Result, measured: Measured) -> str:
    """Add the rows of a run to a file, in place of earlier ones of it; say what to do with them.

    Raises:
        InputError: The file is no such table.
        OSError: It cannot be read or written.
    """
    experiment = result.experiment
    values = {
        ("step time", "s"): measured.measured_step,
        ("peak memory", "bytes"): measured.measured_peak and int(measured.measured_peak),
    }
    target = str(experiment.target)
    new = list_rows(
        experiment,
        values,
        id=f"own-{experiment.digest[:8]}",
        source="own",
        gpu=target,
        target=target,
        read_from=f"dpprof estimate, {result.started_at}",
    )
    rows = [row for row in _read_rows(path) if row["id"] != new[0]["id"]]
    text = io.StringIO()
    table = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    table.writeheader()
    table.writerows([*rows, *new])
    write_atomically(path, text.getvalue())
    return f"written to {path}; compare all its runs: perf/validate.py measured_steps --rows {path}"


def _read_rows(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        table = csv.DictReader(file)
        if tuple(table.fieldnames or ()) != COLUMNS:
            raise InputError(f"{path}: is no table of measured runs; name another file")
        return list(table)
