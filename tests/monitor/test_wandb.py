"""What Weights & Biases keeps of a run without a network, read from its own file."""

import struct
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from dpprof.measure.monitor import WeightsAndBiases

HEADER_BYTES, BLOCK_BYTES = 7, 32 * 1024


def records(path: Path) -> Iterator[bytes]:
    """Read a log of LevelDB's format: blocks, and records that may go on in the next one."""
    data = path.read_bytes()
    at, record = HEADER_BYTES, b""
    while at + HEADER_BYTES <= len(data):
        left = BLOCK_BYTES - at % BLOCK_BYTES
        if left < HEADER_BYTES:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", data[at : at + HEADER_BYTES])
        at += HEADER_BYTES
        record += data[at : at + size]
        at += size
        if kind in {1, 4}:  # whole, or the last part
            yield record
            record = b""


def read_history(path: Path, record_type) -> list[tuple[float, ...]]:
    found = []
    for data in records(path):
        record = record_type.FromString(data)
        if record.WhichOneof("record_type") == "history":
            items = {"/".join(i.nested_key) or i.key: i.value_json for i in record.history.item}
            values = map(float, (items["perf/mfu"], items["perf/carried"]))
            found.append((record.history.step.num, *values))
    return found


def test_an_offline_run_keeps_what_was_logged(tmp_path, monkeypatch) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    from wandb.proto.wandb_internal_pb2 import Record  # noqa: PLC0415

    for name in ("CACHE_DIR", "CONFIG_DIR", "DATA_DIR"):
        monkeypatch.setenv(f"WANDB_{name}", str(tmp_path / name))
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setenv("WANDB_SILENT", "true")
    sink = WeightsAndBiases(project="p", mode="offline", dir=tmp_path)
    sink(4, {"perf/mfu": 0.5, "perf/carried": 0.0})
    sink(5, {"perf/mfu": 0.5, "perf/carried": 1.0})
    sink.close()

    (path,) = tmp_path.glob("wandb/offline-run-*/*.wandb")
    for _ in range(600):  # a process of wandb's writes it, and may not be done yet
        history = read_history(path, Record)
        if len(history) == 2:
            break
        time.sleep(0.1)
    assert history == [(4, 0.5, 0), (5, 0.5, 1)]
