"""Predicted memory and time of private training beside what others published of GPUs.

    export PYTHONPATH=src:tests
    python perf/private_runs.py --output perf/private_runs.md

Every published row is in private_runs.csv, and its source in private_runs.yaml. Nothing is fitted
to a row: a source has one program for all of its rows, written from what it states
(tests/published/programs/private.py), or is an experiment as dpprof's commands take it. Methods of
other libraries that dpprof does not have are small programs too. Peaks are of allocated memory, by
the simulated allocator. The largest batch is the largest for which the simulated allocator finds
room. Times rest on the data sheet of the GPU, and on measured operators where there are any. A
ratio divides by the row of the same model and size, and for peaks of the same batch, whose method
comes first.
"""

import csv
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from dpprof.experiments.config import registry
from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.target import Dtype, Target
from dpprof.predict import capacity
from dpprof.predict.estimate import trace_steps
from dpprof.predict.memory.caching_allocator import CachingAllocator, OutOfMemoryError
from dpprof.predict.step_time.predict import predict_step
from dpprof.system.console import say
from script import ignore, make_parser, publish

FOLDER = Path(__file__).parent
Kind = Literal["peak_memory_mib", "max_batch", "samples_per_s", "seconds_per_step"]
UNITS = {
    "peak_memory_mib": "peak (MiB)",
    "max_batch": "largest batch",
    "samples_per_s": "ms a sample",
    "seconds_per_step": "ms a sample",
}
_DOUBLING = "opacus-fusion"
"""The source that tries powers of 2 only."""

_SMALLEST = {"bert": 16}
"""The batch from which it doubles; 64 for other models."""

_NO_MEMORY = "oom"
_WHOLE_FROM = 100
"""Numbers from here on are shown without digits after the point."""


class Source(NamedTuple):
    """Where rows are from, and what differs from a prediction."""

    name: str
    url: str
    gpu: str
    target: str
    differs: str
    found: str
    """What the comparison shows, and the cause where it was found."""

    dtype: Dtype = "float32"
    optimizer: str = "adam"
    complete: bool = True
    """Whether it states all that a prediction needs."""

    def find_target(self) -> Target:
        """Return the GPU."""
        found = _OTHER_TARGETS.get(self.target) or registry.load("targets", self.target)
        assert isinstance(found, Target)
        return found


def _volta(total_bytes: int) -> Target:
    a100 = registry.load("targets", "a100")
    assert isinstance(a100, Target)
    return a100.model_copy(
        update={
            "memory_bytes": total_bytes - 600 * 2**20,
            "flops_per_s": {"float32": 15.7e12, "float64": 7.8e12, "bfloat16": 125e12},
            "bandwidth_bytes_per_s": 900e9,
            "compute_capability": "7.0",
            "multiprocessors": 80,
            "source": "NVIDIA V100 data sheet, SXM2",
        }
    )


_OTHER_TARGETS = {
    "v100-32gb": _volta(34_089_730_048),
    "v100-16gb": _volta(16_945_512_448),
    "gtx-1080-ti": _volta(11_721_506_816).model_copy(
        update={"compute_capability": "6.1", "multiprocessors": 28}
    ),
}
"""GPUs that dpprof has no data sheet of. Of the last one, only memory is predicted."""


class Row(NamedTuple):
    """A published number."""

    id: str
    source: Source | None
    model: str
    method: str
    """dpprof's name, or that of ``published.programs.private``."""

    kind: Kind
    value: float | None
    """None where it ran out of memory."""

    batch_size: int | None
    size: int | None
    """Height and width of images, or tokens."""

    steps: int
    why: str
    """Why it is not predicted."""

    @property
    def group(self) -> str:
        """Rows whose ratios can be compared."""
        return self.id.rpartition("-")[0]

    @property
    def is_time(self) -> bool:
        """Whether it is a time."""
        return self.kind in {"samples_per_s", "seconds_per_step"}

    @property
    def published(self) -> float | None:
        """The number, with times as milliseconds of a sample."""
        if self.value is None or not self.is_time:
            return self.value
        if self.kind == "samples_per_s":
            return 1e3 / self.value
        assert self.batch_size is not None
        return 1e3 * self.value / self.batch_size


_CONTENT = yaml.safe_load((FOLDER / "private_runs.yaml").read_text(encoding="utf-8"))
SOURCES = {name: Source(**fields) for name, fields in _CONTENT["sources"].items()}
MODELS: dict[str, dict[str, Any]] = _CONTENT["models"]
NOT_RECREATED: dict[str, str] = _CONTENT["not_recreated"]


def read_rows(path: Path = FOLDER / "private_runs.csv") -> list[Row]:
    """Read all rows."""
    with path.open(encoding="utf-8", newline="") as lines:
        return [_read_row(fields) for fields in csv.DictReader(lines)]


def _read_row(fields: dict[str, Any]) -> Row:
    group = fields["id"].rpartition("-")[0]
    numbers = {
        name: int(fields[name]) if fields[name] else None
        for name in ("batch_size", "size", "steps")
    }
    value = None if fields["value"] in {"", _NO_MEMORY} else float(fields["value"])
    source = SOURCES[_CONTENT["groups"][group]] if fields["model"] else None
    return Row(**fields | numbers | {"value": value, "source": source})


class _Training(NamedTuple):
    """What is predicted, but for the batch."""

    source: Source
    model: str
    method: str
    size: int
    steps: int

    @property
    def settings(self) -> dict[str, Any]:
        """Those of the program."""
        known = {"model": self.model, "method": self.method, "size": self.size}
        return known | {"steps": self.steps, "optimizer": self.source.optimizer}

    @property
    def is_experiment(self) -> bool:
        """Whether dpprof's commands take it; otherwise it is a program."""
        return self.model in MODELS and not self.method.startswith("two-passes")

    def experiment(self, batch_size: int) -> Experiment:
        """Describe a Hugging Face model as dpprof's commands do."""
        model = dict(MODELS[self.model])
        if model["hf"] == "gpt2" and self.method != "standard":
            model["tie_word_embeddings"] = False
        reads_images = model["hf"] == "vit-base"
        given = {"image_size": self.size} if reads_images else {"seq_len": self.size}
        return Experiment(
            model=model,
            method=self.method,
            batch_size=batch_size,
            dtype=self.source.dtype,
            attention="eager",
            device="cuda",
            target=self.source.target,
            **given,
        )


@cache
def _record(training: _Training, batch_size: int) -> Any:
    return import_module("published.recording").record(
        import_module("published.programs.private").training,
        training.source.find_target(),
        with_handles=False,  # every source's PyTorch was older than 1.13
        B=batch_size,
        **training.settings,
    )


@cache
def _milliseconds(training: _Training, batch_size: int) -> float:
    """Predict the time of a sample."""
    source = training.source
    if training.is_experiment:
        ops = trace_steps(training.experiment(batch_size), ignore).steady.ops
    else:
        ops = _record(training, batch_size).ops
    return 1e3 * predict_step(ops, source.dtype, source.find_target()).median / batch_size


@cache
def _largest(training: _Training) -> int:
    """Find the largest batch for which the simulated allocator finds room; 0 for none.

    Of a program it is where a line through what two batches reserve reaches the memory: such rows
    were read off figures. Where the source tries powers of 2, each is tried.
    """
    if training.is_experiment:
        measured = capacity.measure(training.experiment(1), ignore).capacity
        assert measured is not None
        return measured.batch_size
    budget = training.source.find_target().memory_bytes
    if training.source is not SOURCES[_DOUBLING]:
        return int(_by_line(training, 128, budget))
    least = _SMALLEST.get(training.model, 64)
    batch = least * 2 ** max(int(math.log2(max(_by_line(training, least, budget) / least, 1))), 0)
    while _fits(training, batch, budget):
        batch *= 2
    while batch >= least and not _fits(training, batch, budget):
        batch //= 2
    return batch if batch >= least else 0


def _by_line(training: _Training, least: int, budget: int) -> float:
    """Return the batch for which a line through two small ones reserves all memory."""
    first, second = (
        2**20 * _record(training, batch).peak("reserved") for batch in (least, 2 * least)
    )
    return float(least * (1 + (budget - first) / (second - first)))


def _fits(training: _Training, batch_size: int, budget: int) -> bool:
    allocator = CachingAllocator(budget)
    try:
        for key, size in _record(training, batch_size).changes:
            if size > 0:
                allocator.allocate(key, size)
            else:
                allocator.free(key)
    except OutOfMemoryError:
        return False
    return True


def predict(row: Row) -> float:
    """Predict a row's number, with times as milliseconds of a sample.

    Where memory ran out while it was timed, the time is infinite if it is predicted to run out.
    """
    assert row.source is not None
    assert row.size is not None
    training = _Training(row.source, row.model, row.method, row.size, row.steps)
    if row.kind == "max_batch":
        return _largest(training)
    assert row.batch_size is not None
    if row.kind == "peak_memory_mib":
        return float(_record(training, row.batch_size).peak("allocated"))
    if row.value is None and not _holds(training, row.batch_size):
        return math.inf
    return _milliseconds(training, row.batch_size)


def _holds(training: _Training, batch_size: int) -> bool:
    if training.is_experiment:
        return batch_size <= _largest(training)
    return _fits(training, batch_size, training.source.find_target().memory_bytes)


class Compared(NamedTuple):
    """A published number, and what was predicted for it."""

    row: Row
    predicted: float
    reference: "Compared | None" = None
    """The row that ratios divide by; None for such a row, and where there is none."""

    @property
    def error(self) -> float | None:
        """Predicted over published, less 1; None where memory ran out."""
        return _relative(self.predicted, self.row.published)

    @property
    def ratios(self) -> tuple[float, float] | None:
        """The published and the predicted ratio to the reference."""
        base = self.reference
        if base is None or self.row.published is None or not base.row.published:
            return None
        return self.row.published / base.row.published, self.predicted / base.predicted

    @property
    def ratio_error(self) -> float | None:
        """The predicted ratio over the published one, less 1."""
        return None if self.ratios is None else self.ratios[1] / self.ratios[0] - 1

    @property
    def fits(self) -> bool:
        """Whether what is predicted is within the GPU's memory."""
        assert self.row.source is not None
        if self.row.is_time:
            return self.predicted < math.inf
        return self.predicted * 2**20 <= self.row.source.find_target().memory_bytes


def _relative(predicted: float, published: float | None) -> float | None:
    return None if published is None else predicted / published - 1


def compare(rows: Iterable[Row], predicting: Callable[[Row], float] = predict) -> list[Compared]:
    """Predict every row that can be re-created, and find the row that its ratios divide by."""
    compared: list[Compared] = []
    references: dict[tuple[Any, ...], Compared] = {}
    for row in rows:
        if row.why:
            continue
        one = Compared(row, predicting(row))
        batch = row.batch_size if row.kind == "peak_memory_mib" else None
        # Both units of a time are other runs.
        key = row.group, row.model, row.kind, row.size, batch, row.steps
        reference = references.get(key)
        if reference is None and row.published is not None:
            references[key] = one
        elif reference is not None and reference.row.method != row.method:
            one = one._replace(reference=reference)
        compared.append(one)
        if one.error is not None:
            say(f"{row.id}: {one.error:+.1%}")
    return compared


def _median(numbers: Iterable[float | None]) -> str:
    found = [abs(number) for number in numbers if number is not None]
    return f"{statistics.median(found):.1%} of {len(found)}" if found else ""


def _cell(number: float | None) -> str:
    if number is None or number == math.inf:
        return ""
    return f"{number:.3g}" if number < _WHOLE_FROM else f"{number:,.0f}"


def _percent(number: float | None) -> str:
    return "" if number is None else f"{number:+.1%}"


def _lay_out(one: Compared) -> str:
    row, ratios = one.row, one.ratios or (None, None)
    published = _cell(row.published)
    error = _percent(one.error)
    if row.value is None:
        published = "out of memory"
        error = "fits" if one.fits else "does not fit"
    batch = f"{row.batch_size:,}" if row.batch_size else ""
    cells = [
        *(row.model, row.method, f"{row.size}", batch, UNITS[row.kind]),
        *(published, _cell(one.predicted), error),
        *(_cell(ratios[0]), _cell(ratios[1]), _percent(one.ratio_error)),
    ]
    return f"| {' | '.join(cells)} |"


def _of_kind(compared: Sequence[Compared], kind: str) -> list[Compared]:
    return [one for one in compared if UNITS[one.row.kind] == kind]


def _summarise(compared: Sequence[Compared]) -> list[str]:
    kinds = list(dict.fromkeys(UNITS.values()))
    heads = [f"{kind}{of}" for kind in kinds for of in ("", ", ratio")]
    lines = [
        "Medians of absolute errors, and of how many rows:",
        "",
        f"| source | {' | '.join(heads)} |",
        f"| --- |{' ---: |' * len(heads)}",
    ]
    complete = [one for one in compared if one.row.source and one.row.source.complete]
    groups = {
        source.name: [one for one in compared if one.row.source is source]
        for source in SOURCES.values()
    }
    for name, some in {**groups, "all that state what is needed": complete}.items():
        cells = []
        for kind in kinds:
            of_kind = _of_kind(some, kind)
            cells += [
                _median(one.error for one in of_kind),
                _median(one.ratio_error for one in of_kind),
            ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def _count_left_out(rows: Sequence[Row]) -> list[str]:
    lines = ["| not re-created | rows | why |", "| --- | ---: | --- |"]
    for why, text in NOT_RECREATED.items():
        left = [row for row in rows if row.why == why]
        names = ", ".join(dict.fromkeys(row.group for row in left))
        lines.append(f"| {names} | {len(left)} | {text} |")
    return lines


_COLUMNS = (
    *("model", "method", "pixels or T", "B", "number", "published", "predicted", "error"),
    *("ratio published", "ratio predicted", "error"),
)


def tabulate(rows: Sequence[Row], compared: Sequence[Compared]) -> str:
    """Lay out medians, what is left out, and every row."""
    lines = [
        f"Of {len(rows)} published numbers {len(compared)} are re-created.",
        "",
        *_summarise(compared),
        "",
        *_count_left_out(rows),
    ]
    for source in SOURCES.values():
        lines += [
            *(
                "",
                f"## {source.name}",
                "",
                f"[Source]({source.url}). {source.gpu}. {source.differs}.",
            ),
            *("", f"| {' | '.join(_COLUMNS)} |"),
            f"| --- | --- | ---: | ---: | --- |{' ---: |' * (len(_COLUMNS) - 5)}",
            *(_lay_out(one) for one in compared if one.row.source is source),
        ]
    return "\n".join(lines)


def main() -> None:
    """Predict all rows, and print and write the tables."""
    arguments = make_parser(__doc__).parse_args()
    rows = read_rows()
    text = tabulate(rows, compare(rows))
    publish(__doc__, text, arguments.output)


if __name__ == "__main__":
    main()
