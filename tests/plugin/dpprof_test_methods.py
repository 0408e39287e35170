"""Another package's methods, each of which fails in its own way, and models.

Found through its entry points when this folder is on PYTHONPATH, as an installed
plug-in would be.
"""

import os
import signal
from pathlib import Path

import torch
from torch import nn

from dpprof.catalogue import UnsupportedError
from dpprof.methods.standard import Standard
from dpprof.target import Target


class Fails(Standard):
    """A standard step whose backward phase ends badly."""

    def compute_gradient(self, batch, enter):
        super().compute_gradient(batch, enter)
        self.fail()


class Dies(Fails):
    def fail(self):
        os.kill(os.getpid(), signal.SIGKILL)


class DiesOnce(Fails):
    def fail(self):
        marker = Path(os.environ["DPPROF_TEST_MARKER"])
        if not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)


class Raises(Fails):
    def fail(self):
        raise RuntimeError("a <script>alert(1)</script> \\input{x} $(touch pwned) | `x` & \x1b[31m")


class Refuses(Standard):
    def __init__(self, model, experiment):  # noqa: ARG002
        raise UnsupportedError("this method refuses every model")


class Scale(nn.Module):
    """A layer that Opacus has no rule for."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x * self.weight


def build_scaled(experiment):
    """As ``build_linear``, with a layer in between that takes Opacus's fallback."""
    return nn.Sequential(nn.Embedding(11, 3), Scale(3), nn.Linear(3, 11, bias=False))


def build_linear(experiment):
    """Embedding and head, nothing between."""
    return nn.Sequential(nn.Embedding(11, 3), nn.Linear(3, 11, bias=False))


BOARD = Target.model_validate(
    {"memory_bytes": "64MiB", "flops_per_s": 1e9, "bandwidth_bytes_per_s": 1e8, "source": "a board"}
)
