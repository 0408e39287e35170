"""Reads evidence.csv: what others published of training on GPUs, and what was measured for dpprof.

A row is one number, with where it was read. Its settings are a YAML mapping without the braces, so
that one schema holds for every page. What the rows of a page or a source share, and the models and
GPUs of experiments, are in evidence.yaml.
"""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from dpprof.experiments.config import registry
from dpprof.experiments.config.target import Dtype, Target

DATA = Path(__file__).with_name("evidence.csv")
OUT_OF_MEMORY = "out of memory"
_SHARED = yaml.safe_load(DATA.with_suffix(".yaml").read_text(encoding="utf-8"))
PAGES: dict[str, str] = _SHARED["pages"]
"""The introduction of each page."""

MODELS: dict[str, dict[str, Any]] = _SHARED["models"]
NOT_RECREATED: dict[str, str] = _SHARED["not_recreated"]


class Source(NamedTuple):
    """What the rows of a source share."""

    key: str
    name: str
    differs: str = ""  # what its training has that a prediction leaves out
    shows: str = ""  # what the comparison shows, and the cause of a difference where it was found
    gpu: str = ""  # of the GPU, where more is to be said than each row does
    torch: str = ""  # the version of PyTorch, as it is said
    dtype: Dtype = "float32"
    optimizer: str = "adam"
    complete: bool = True  # whether it states all that a prediction needs
    doubles: bool = False  # whether it tries batches that are powers of 2 only


SOURCES = {key: Source(key, **fields) for key, fields in _SHARED["sources"].items()}


_A100: Target = registry.load("targets", "a100")
_OTHER_TARGETS = {
    name: _A100.model_copy(update=fields) for name, fields in _SHARED["targets"].items()
}


def find_target(name: str) -> Target:
    """Return a GPU."""
    target = _OTHER_TARGETS.get(name) or registry.load("targets", name)
    assert isinstance(target, Target)
    return target


class Row(NamedTuple):
    """A number."""

    id: str
    page: str  # the page that shows it
    source: Source
    gpu: str
    target: str
    model: str  # one of ``MODELS``, or a program of ``published.programs``
    method: str
    settings: Mapping[str, Any]
    quantity: str
    value: float | None  # None where memory ran out, or nothing is stated
    unit: str
    read_from: str
    not_predicted: str  # why not

    @property
    def group(self) -> str:
        """The part of the source that it is from."""
        return self.id.rpartition("-")[0]

    @property
    def step_s(self) -> float:
        """Seconds of a step with one batch."""
        assert self.value is not None
        if self.unit == "tokens/s":
            return float(self.settings["batch_size"] * self.settings["seq_len"] / self.value)
        return self.value

    @property
    def is_compiled(self) -> bool:
        """Whether ``torch.compile`` fused operators. Predictions are for eager steps."""
        return self.settings.get("compiled") is True

    @property
    def introduction(self) -> list[str]:
        """The beginning of a section about its source."""
        source = self.source
        lines = ["", f"## {source.name}", ""]
        lines += [f"[Source]({self.read_from}). {source.gpu or self.gpu}. {source.differs}.", ""]
        return [*lines, f"{source.shows}.", ""] if source.shows else lines


def read_rows(page: str, path: Path = DATA) -> list[Row]:
    """Read the rows of a page."""
    with path.open(encoding="utf-8", newline="") as file:
        return [_read_row(cells) for cells in csv.DictReader(file) if cells["page"] == page]


def _read_row(cells: dict[str, Any]) -> Row:
    value = cells["value"]
    fields = {
        "source": SOURCES.get(cells["source"]) or Source(cells["source"], cells["source"]),
        "settings": yaml.safe_load("{" + cells["settings"] + "}"),
        "value": None if value in {"", OUT_OF_MEMORY} else float(value),
    }
    return Row(**cells | fields)
