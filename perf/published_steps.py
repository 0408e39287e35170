"""Reads published_steps.yaml: whole training steps on GPUs, with what others published of each.

A row is an experiment, as ``dpprof estimate`` takes it, or a program of ``tests/published``, where
the source trains a model that no experiment describes.
"""

from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from dpprof.ask.questions import make_experiment
from dpprof.experiments.config import registry
from dpprof.experiments.config.target import Dtype, Target
from dpprof.experiments.config.validation import refuse
from dpprof.experiments.records.result import PredictedTime
from dpprof.experiments.records.terms import Phase
from dpprof.predict.estimate import trace_steps
from dpprof.predict.memory.events import Op
from dpprof.predict.step_time.predict import predict_step
from older_kernels import KERNELS

DATA = Path(__file__).with_name("published_steps.yaml")


class Source(NamedTuple):
    """Where rows are from, and what their training has that a prediction leaves out."""

    name: str
    url: str
    gpu: str
    target: str
    differs: str
    gpus: int = 1
    """GPUs that share parameters, gradients and optimizer states; 1 where nothing is shared."""

    attention: str = ""
    """One of ``older_kernels.KERNELS``; of current libraries where it says nothing."""


class Row(NamedTuple):
    """A published step of one GPU.

    It has ``tokens_per_s`` of one GPU, or the seconds of a step.
    """

    source: Source
    label: str
    batch_size: int
    seq_len: int
    dtype: Dtype = "bfloat16"
    tokens_per_s: float | None = None
    step_s: float | None = None
    model: Mapping[str, Any] | None = None
    """The model of an experiment."""

    checkpointing: str = "none"
    program: str = ""
    """Module and function in ``published.programs``, instead of a model."""

    settings: Mapping[str, Any] = {}
    micro_batches: int = 1
    """Batches for each update of the parameters."""

    mfu: float | None = None
    """Percent, as published beside ``tokens_per_s``: a check of what was copied."""

    parameters: int | None = None
    """Those that ``mfu`` rests on."""

    compiled: bool = False
    """Whether ``torch.compile`` fused operators. Predictions are for eager steps."""

    @property
    def published_s(self) -> float:
        """Seconds of a step with one batch."""
        if self.step_s is not None:
            return self.step_s
        assert self.tokens_per_s is not None
        return self.batch_size * self.seq_len / self.tokens_per_s

    def find_target(self) -> Target:
        """Return the GPU."""
        found = registry.load("targets", self.source.target)
        assert isinstance(found, Target)
        return found


def read_rows(path: Path = DATA) -> list[Row]:
    """Read all rows.

    Raises:
        InputError: A row has no such source, a key that rows do not have, or not one of
            ``tokens_per_s`` and ``step_s``.
    """
    content = yaml.safe_load(path.read_text(encoding="utf-8"))
    sources = {name: Source(**fields) for name, fields in content["sources"].items()}
    return [_read_row(fields, sources) for fields in content["rows"]]


def _read_row(fields: dict[str, Any], sources: Mapping[str, Source]) -> Row:
    if fields.get("source") not in sources:
        raise refuse("source", fields.get("source"), f"it must be one of {', '.join(sources)}")
    if unknown := fields.keys() - set(Row._fields):
        raise refuse("row", unknown.pop(), f"keys are {', '.join(Row._fields)}")
    if ("tokens_per_s" in fields) == ("step_s" in fields):
        raise refuse("row", fields.get("label"), "it must have one of tokens_per_s and step_s")
    return Row(**fields | {"source": sources[fields["source"]]})


def predict(row: Row) -> PredictedTime:
    """Predict a row's step on one of its GPUs, as ``dpprof estimate`` does."""
    ops = _trace_program(row) if row.program else _trace_experiment(row)
    times = KERNELS[row.source.attention]
    return predict_step(ops, row.dtype, row.find_target(), model_of=times)


def _trace_program(row: Row) -> list[Op]:
    module, _, function = row.program.partition(".")
    run = getattr(import_module(f"published.programs.{module}"), function)
    ops: list[Op] = import_module("published.recording").record_step(
        run, row.find_target(), **row.settings
    )
    return ops


def _trace_experiment(row: Row) -> list[Op]:
    fields = {
        "model": yaml.safe_dump(dict(row.model or {}), default_flow_style=True, width=10_000),
        "method": "standard",
        "batch_size": str(row.batch_size),
        "seq_len": str(row.seq_len),
        "dtype": row.dtype,
        "checkpointing": row.checkpointing,
        "target": row.source.target,
    }
    steady = trace_steps(make_experiment(fields), _ignore).steady
    return [_divide_update(op, row.source.gpus * row.micro_batches) for op in steady.ops]


def _ignore(_phase: Phase) -> None:
    pass


def _divide_update(op: Op, by: int) -> Op:
    """Return an operator with its share of an update of the parameters.

    GPUs that share the optimizer's states update a part each, and one update serves all batches
    whose gradients were added up.
    """
    if op.phase != "step":
        return op
    reads, writes = (
        [(number, size // by) for number, size in moved] for moved in (op.reads, op.writes)
    )
    return op._replace(reads=reads, writes=writes)
