"""The table ``timeline``, which is written run by run: all of it may be too large to hold."""

from collections.abc import Iterator
from typing import Any, BinaryIO

from dpprof.analysis.axes import key_of
from dpprof.analysis.csv_text import write_rows
from dpprof.analysis.table_columns import TABLES
from dpprof.planning.planner import PlannedRun
from dpprof.records.result import Result
from dpprof.records.terms import COMPONENTS

_COLUMNS = list(TABLES["timeline"].columns)


class TimelineFile:
    """The table as a CSV file, to which runs are added; the same bytes as those of its frame.

    Args:
        file: To write to.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._add([_COLUMNS])

    def add(self, run: PlannedRun, result: Result) -> None:
        """Add the instants of a run; nothing where it has none."""
        self._add([row[name] for name in _COLUMNS] for row in list_instants(run, result))

    def _add(self, rows: Any) -> None:
        self._file.write(write_rows(rows).encode())


def list_instants(run: PlannedRun, result: Result) -> Iterator[dict[str, Any]]:
    """Yield the rows of a run: one for each instant of a step, with bytes by component."""
    line = result.memory and result.memory.timeline
    # The timeline of a capacity is for another batch size than the experiment's.
    if not line or result.capacity:
        return
    for row, (ops, phase) in enumerate(zip(line.ops, line.phase, strict=True)):
        yield (
            key_of(run)
            | {"ops": ops, "phase": phase, "elapsed_s": line.elapsed_s and line.elapsed_s[row]}
            | {"op": line.op and line.op[row]}
            | dict.fromkeys(COMPONENTS, 0)
            | {component: sizes[row] for component, sizes in line.components.items()}
        )
