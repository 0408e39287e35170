"""An error in a capture is told as it was raised, though the end of the capture raises another."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from dpprof.private.capture.cuda_graphs import CudaGraphs

streams: list[str] = []


@contextmanager
def failing_capture(*_, **__):
    try:
        yield
    except BaseException as error:
        raise RuntimeError("operation failed due to a previous error during capture") from error


@pytest.fixture
def graphs(monkeypatch):
    """Graphs of a machine without a GPU, whose captures fail."""
    device = torch.device("cuda", 0)
    for name, stands_in in {
        "default_generators": [torch.Generator()],
        "Stream": lambda device: SimpleNamespace(device=device),
        "graph_pool_handle": lambda: (0, 0),
        "CUDAGraph": lambda: None,
        "current_stream": lambda _: "the usual one",
        "set_stream": streams.append,
        "graph": failing_capture,
    }.items():
        monkeypatch.setattr(torch.cuda, name, stands_in)
    streams.clear()
    return CudaGraphs(device, list)


def fail(message: str):
    def run():
        raise ValueError(message)

    return run


@pytest.mark.parametrize(
    ("message", "kind", "told"),
    [
        ("no such layer", ValueError, "no such layer"),
        ("dependency created on uncaptured work", RuntimeError, r"keep losses\.detach\(\)"),
    ],
)
def test_a_capture_that_fails_tells_the_first_error(graphs, message, kind, told) -> None:
    with pytest.raises(kind, match=told):
        graphs.capture(fail(message))

    assert streams == ["the usual one"]
