"""The numbers of a trace as TensorBoard reads them."""

import time
from pathlib import Path

from tensorboard.compat.proto.event_pb2 import Event
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.summary.writer.event_file_writer import EventFileWriter

from dpprof.result import Kernels


def write_events(folder: Path, kernels: Kernels) -> None:
    """Write milliseconds a step, by category and by phase, in place of what was there.

    Args:
        folder: A run, in TensorBoard's sense.
        kernels: What the trace told.
    """
    for old in folder.glob("events.out.tfevents.*"):
        old.unlink()
    scalars = {"step": kernels.step_s, "idle": kernels.idle_s, "total": kernels.total_s}
    scalars |= {f"category/{name}": value for name, value in kernels.by_category.items()}
    scalars |= {f"phase/{name}": value for name, value in kernels.by_phase.items()}
    values = [
        Summary.Value(tag=f"kernels_ms/{name}", simple_value=seconds * 1e3)
        for name, seconds in scalars.items()
    ]
    writer = EventFileWriter(str(folder))
    writer.add_event(Event(step=0, wall_time=time.time(), summary=Summary(value=values)))
    writer.close()
