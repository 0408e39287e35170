"""The peaks of every kind of layer: predicted, recorded, and those of the allocator."""

import gc

import pytest
import torch
from layer_kinds import KINDS, built_by
from torch import nn

from dpprof.instruments import phases
from dpprof.instruments.estimate import estimate
from dpprof.instruments.memory import measure
from dpprof.records.step_costs import Memory, find_unknown_workspaces

QUICK = (
    *("LSTM", "LSTM-3-both-dropout", "LSTM-projected", "LSTM-of-one", "GRU-both", "RNN-relu"),
    *("Fourier", "stft", "MultiheadAttention-fused", "BatchNorm2d", "EmbeddingBag-max", "masked"),
)
NOT_HERE = {
    nn.AdaptiveLogSoftmaxWithLoss: "its result's shape depends on elements",
    nn.SyncBatchNorm: "it runs on GPUs alone",
    nn.TransformerEncoder: "it is made of layers that are here",
    nn.TransformerDecoder: "it is made of layers that are here",
    nn.RNNBase: "its subclasses are here",
    nn.RNNCellBase: "its subclasses are here",
}
SCALARS = 64
"""Numbers that PyTorch wraps in tensors, and the like."""

kinds = pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k in QUICK else pytest.mark.slow) for k in KINDS]
)


def look(kind: str, instrument, **fields) -> Memory:
    gc.collect()  # what other tests have left must not be freed within
    with built_by(KINDS[kind], **fields) as experiment:
        memory: Memory = instrument(experiment, lambda _: None).memory
    return memory


@kinds
def test_the_predicted_peak_is_the_recorded_one_and_that_of_the_allocator(kind) -> None:
    predicted, recorded = look(kind, estimate), look(kind, measure)
    allocated = look(kind, phases.measure)

    for name in ("peak_allocated_bytes", "first_step_peak_allocated_bytes", "at_peak"):
        assert getattr(predicted, name) == getattr(recorded, name)
    assert find_unknown_workspaces(predicted.assumed) == find_unknown_workspaces(recorded.assumed)
    if not find_unknown_workspaces(recorded.assumed):
        assert abs(allocated.peak_allocated_bytes - recorded.peak_allocated_bytes) <= SCALARS
