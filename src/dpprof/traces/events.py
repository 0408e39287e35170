"""Writes the numbers of a trace for TensorBoard."""

from pathlib import Path

from dpprof.records.result import Kernels
from dpprof.traces.tensorboard_events import TensorBoard


def write_events(folder: Path, kernels: Kernels) -> None:
    """Write milliseconds of a step, by op kind and by phase; replace existing events.

    Args:
        folder: The folder of a run, in TensorBoard's sense.
        kernels: The summary of the trace.
    """
    for old in folder.glob("events.out.tfevents.*"):
        old.unlink()
    seconds = {"step": kernels.step_s, "idle": kernels.idle_s, "total": kernels.total_s}
    seconds |= {f"op_kind/{name}": value for name, value in kernels.by_op_kind.items()}
    seconds |= {f"phase/{name}": value for name, value in kernels.by_phase.items()}
    board = TensorBoard(folder)
    board(0, {f"kernels_ms/{name}": value * 1e3 for name, value in seconds.items()})
    board.close()
