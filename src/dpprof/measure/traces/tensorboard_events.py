"""Writes values by step to files that TensorBoard reads."""

import math
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path

FLUSH_S = 30.0  # the longest delay until a viewer sees values


class TensorBoard:
    """Writes the values of a step as one event to a file of TensorBoard's format.

    It writes within the step. TensorBoard's own writer passes events to a thread. That took more
    than twice the CPU time, because the thread competes with training for the interpreter.

    The folder is created if it is missing.

    Raises:
        OSError: The directory cannot be written to.
        ImportError: TensorBoard is not installed.
    """

    def __init__(self, directory: str | Path) -> None:
        # The import is slow, so it happens only where a file is written.
        try:
            from tensorboard.compat.proto.event_pb2 import Event  # noqa: PLC0415
            from tensorboard.summary.writer.record_writer import RecordWriter  # noqa: PLC0415
        except ImportError as error:
            raise ImportError(
                "TensorBoard is not installed; pip install 'dpprof[monitor]'"
            ) from error

        folder = Path(directory)
        folder.mkdir(parents=True, exist_ok=True)
        name = f"events.out.tfevents.{time.time_ns()}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("xb")
        self._records = RecordWriter(self._file)
        self._make_event = Event
        self._event = Event(wall_time=time.time(), file_version="brain.Event:2")
        self._records.write(self._event.SerializeToString())
        self._values: Mapping[str, float] = {}
        self._flushed_s = -math.inf

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values of a step."""
        if values != self._values:  # most values are carried over unchanged
            self._values = dict(values)
            self._event = self._make_event()
            for name, value in values.items():
                self._event.summary.value.add(tag=name, simple_value=value)
        self._event.step = step
        self._event.wall_time = time.time()
        self._records.write(self._event.SerializeToString())
        if time.monotonic() - self._flushed_s >= FLUSH_S:
            self._file.flush()
            self._flushed_s = time.monotonic()

    def close(self) -> None:
        """Write remaining events, and close the file."""
        self._file.close()
