"""One line on a terminal that counts what was found, and goes away when the answer comes."""

import shutil
import sys
import threading
from types import TracebackType
from typing import Self

from dpprof.experiments.launch.progress import format_duration
from dpprof.experiments.records.result import Result
from dpprof.system.console import printable

_BLANK = "\r\x1b[2K"  # goes to the begin of the terminal's line, and clears it


class ProgressLine:
    """Counts capacities on standard error; it says nothing where that is no terminal.

    Args:
        total: How many there will be.
    """

    def __init__(self, total: int) -> None:
        self._total, self._found = total, 0
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self._write(f"0 of {self._total} found")
        return self

    def tell(self, result: Result) -> None:
        """Count a capacity, and say what it is; threads may call this at the same time."""
        experiment, capacity = result.experiment, result.capacity
        what = f"{experiment.method} on {experiment.model_name}, {experiment.dtype}"
        if capacity is not None:
            what += f": a batch of {capacity.batch_size:,} fits"
        elif result.error is not None:
            what += f": {result.outcome}: {result.error.message}"
        with self._lock:
            self._found += 1
            took = format_duration(result.wall_s)
            self._write(f"{self._found} of {self._total} found, in {took}: {what}")

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._write("")

    @staticmethod
    def _write(text: str) -> None:
        if not sys.stderr.isatty():
            return
        most = shutil.get_terminal_size().columns - 1
        line = printable(f"dpprof: {text}" if text else "").replace("\n", " ")
        try:
            sys.stderr.write(_BLANK + (line if len(line) <= most else f"{line[: most - 3]}..."))
            sys.stderr.flush()
        except OSError:
            return  # a closed terminal is no error
