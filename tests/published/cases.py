"""The published cases: what somebody's GPU did, and what is predicted for it."""

import json
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from published.recording import Recording, record

from dpprof.experiments.config import registry
from dpprof.experiments.config.target import Target

DATA = Path(__file__).parent / "data"
_CONTENT = json.loads((DATA / "cases.json").read_text())
_PER_GIB = 1024


class Source(NamedTuple):
    name: str
    url: str
    gpu: str
    torch: str


class Case(NamedTuple):
    id: str
    source: str
    program: str
    """Module and function in ``published.programs``."""

    target: str
    settings: dict[str, Any]
    label: str
    counter: str
    """``rounded``, ``allocated`` or ``reserved``: an attribute of a ``Recording``."""

    read: dict[str, Any]
    """``at`` an instant, ``peak`` since one (``until`` another), or ``increase`` between two."""

    published: float
    unit: str
    slow: bool = False
    before: float = 0.0
    """MiB that earlier benchmarks of the process left behind: fitted, one number to a table."""

    differs: float | None = None
    """The difference in percent, where it is known and stays."""

    why: str = ""
    note: str = ""

    def predict(self) -> float:
        """Predict the number; in the unit of the published one."""
        recording = _record(self.program, self.target, json.dumps(self.settings))
        mib = self.before + _read(recording, self.counter, **self.read)
        return mib / _PER_GIB if self.unit == "GiB" else mib

    def difference(self) -> float:
        """Return by how many percent the prediction differs."""
        return 100 * (self.predict() / self.published - 1)


@cache
def _record(program: str, target: str, settings: str) -> Recording:
    module, _, function = program.partition(".")
    run = getattr(import_module(f"published.programs.{module}"), function)
    return record(run, _find_target(target), **json.loads(settings))


def _read(
    recording: Recording,
    counter: str,
    *,
    at: str | None = None,
    peak: str | None = None,
    until: str = "end",
    increase: tuple[str, str] | None = None,
) -> float:
    if increase is not None:
        since, until = increase
        return recording.peak(counter, since, until) - recording.at(counter, since)
    return recording.peak(counter, peak, until) if peak else recording.at(counter, at or "end")


def _find_target(name: str) -> Target:
    if name == "p100":
        # Only what memory depends on (Pascal P100 white paper); it is not among the targets.
        changes = {"compute_capability": "6.0", "multiprocessors": 56}
        return registry.load("targets", "a100").model_copy(update=changes)
    return registry.load("targets", name)


SOURCES = {name: Source(**fields) for name, fields in _CONTENT["sources"].items()}
CASES = [Case(**fields) for fields in _CONTENT["cases"]]
