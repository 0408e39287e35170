"""Where metrics are written: TensorBoard, Weights & Biases, or any callable."""

import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

Sink = Callable[[int, Mapping[str, float]], None]
"""Called with a step's number and its values by name. If it has a ``close``, that is called
when the monitor closes."""


class TensorBoard:
    """Writes the values of a step as one event to a file of TensorBoard's.

    Args:
        directory: Where the file goes; made where it is missing.

    Raises:
        OSError: The directory cannot be written.
    """

    def __init__(self, directory: str | Path) -> None:
        # Importing it takes a while, which is for those who write there.
        from tensorboard.compat.proto.event_pb2 import Event  # noqa: PLC0415
        from tensorboard.compat.proto.summary_pb2 import Summary  # noqa: PLC0415
        from tensorboard.summary.writer.event_file_writer import EventFileWriter  # noqa: PLC0415

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(directory))

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        """Hand the values to the thread that writes."""
        summary = self._summary()
        for name, value in values.items():
            summary.value.add(tag=name, simple_value=value)
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        """Write what is left, and close the file."""
        self._writer.close()


class WeightsAndBiases:
    """Logs the values of a step to a run of its own at Weights & Biases.

    For a run that is under way already, a callable is enough:
    ``lambda step, values: run.log(values, step=step)``.

    Args:
        **init: What ``wandb.init`` takes: ``project``, ``mode="offline"``, ``dir`` and others.

    Raises:
        ImportError: wandb is not installed.
    """

    def __init__(self, **init: Any) -> None:
        try:
            import wandb  # noqa: PLC0415 (an extra)
        except ImportError as error:
            raise ImportError("wandb is not installed; pip install 'dpprof[wandb]'") from error
        self._run = wandb.init(**init)

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()
