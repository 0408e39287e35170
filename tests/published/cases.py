"""The published cases: what somebody's GPU did, and what is predicted for it."""

import json
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

from published.recording import Recording, record

from evidence import Row, find_target, read_rows

_PER_GIB = 1024


class Case(NamedTuple):
    """A row of evidence.csv, and how its number is read off a record of its program."""

    row: Row
    label: str
    program: Mapping[str, Any]
    """Settings of the program."""

    at: str = "end"
    """The instant of the number."""

    peak: str | None = None
    """The instant from which on it is the most, ``until`` another."""

    until: str = "end"
    increase: tuple[str, str] | None = None
    """Two instants between which it is the increase to the most."""

    slow: bool = False
    before: float = 0.0
    """MiB that earlier benchmarks of the process left behind: fitted, one number to a table."""

    differs: float | None = None
    """The difference in percent, where it is known and stays."""

    why: str = ""
    note: str = ""

    @property
    def counter(self) -> str:
        """``requested``, ``allocated`` or ``reserved``: an attribute of a ``Recording``."""
        return self.row.quantity.removesuffix(" memory")

    def predict(self) -> float:
        """Predict the number; in the unit of the published one."""
        recording = _record(self.row.model, self.row.target, json.dumps(self.program))
        mib = self.before + self._read(recording)
        return mib / _PER_GIB if self.row.unit == "GiB" else mib

    def _read(self, recording: Recording) -> float:
        if self.increase is not None:
            since, until = self.increase
            return recording.peak(self.counter, since, until) - recording.at(self.counter, since)
        if self.peak is not None:
            return recording.peak(self.counter, self.peak, self.until)
        return recording.at(self.counter, self.at)

    def difference(self) -> float:
        """Return by how many percent the prediction differs."""
        return 100 * (self.predict() / self.row.value - 1)


@cache
def _record(program: str, target: str, settings: str) -> Recording:
    module, _, function = program.partition(".")
    run = getattr(import_module(f"published.programs.{module}"), function)
    return record(run, find_target(target), **json.loads(settings))


CASES = [Case(row, **row.settings) for row in read_rows("validation")]
