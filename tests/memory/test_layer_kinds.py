"""The peaks of every kind of layer: predicted, recorded, and those of the allocator."""

import gc
import inspect
import re

import pytest
import torch
from factory import make_experiment
from layer_kinds import FEW, KINDS, built_by
from torch import nn

import dpprof
from dpprof.experiments.config import registry
from dpprof.experiments.records.step_costs import Memory, find_unknown_workspaces
from dpprof.measure.instruments import phases
from dpprof.measure.instruments.memory import measure
from dpprof.predict.estimate import estimate
from dpprof.private.errors import UnsupportedError

QUICK = (
    *("LSTM-3-both-dropout", "LSTM-projected", "LSTM-of-one", "GRU-both", "RNN-relu"),
    *("Fourier", "stft", "MultiheadAttention-fused", "BatchNorm2d", "EmbeddingBag-max", "masked"),
)
RECURRENT = ("LSTM", "LSTM-2-dropout", "GRU-both", "RNN-2", "LSTM-projected")
NOT_HERE = {
    nn.SyncBatchNorm: "it runs on GPUs alone",
    nn.RNNBase: "its subclasses are here",
    nn.RNNCellBase: "its subclasses are here",
}
SCALARS = 64
"""Numbers that PyTorch wraps in tensors, and the like."""

kinds = pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=() if k in QUICK else pytest.mark.slow) for k in KINDS]
)


def look(kind: str, instrument, **fields) -> Memory:
    with built_by(KINDS[kind], **fields) as experiment:
        memory: Memory = instrument(experiment, lambda _: None).memory
    return memory


@kinds
def test_the_predicted_peak_is_the_recorded_one_and_that_of_the_allocator(kind) -> None:
    predicted, recorded = look(kind, estimate), look(kind, measure)
    gc.collect()  # what other tests have left must not be freed within
    allocated = look(kind, phases.measure)

    for name in ("peak_allocated_bytes", "first_step_peak_allocated_bytes", "at_peak"):
        assert getattr(predicted, name) == getattr(recorded, name)
    assert find_unknown_workspaces(predicted.assumed) == find_unknown_workspaces(recorded.assumed)
    if not find_unknown_workspaces(recorded.assumed):
        assert abs(allocated.peak_allocated_bytes - recorded.peak_allocated_bytes) <= SCALARS


@pytest.mark.parametrize(
    ("kind", "method"),
    [
        ("LSTM-2-dropout", "flash-bk"),
        ("GRU", "flash"),
        *(
            pytest.param(kind, method, marks=pytest.mark.slow)
            for kind in ("Conv2d", "Embedding", "LayerNorm", "GroupNorm-2d", "Linear-steps")
            for method in registry.names("methods")
        ),
        *(
            pytest.param(kind, method, marks=pytest.mark.slow)
            for kind in (*RECURRENT, "Bilinear")
            for method in ("flash", "flash-bk", "per-layer", "microbatch")
        ),
        pytest.param("Fourier", "flash-bk", marks=pytest.mark.slow),
    ],
)
def test_private_methods_predict_what_is_recorded(kind, method) -> None:
    try:
        recorded = look(kind, measure, method=method, noise_multiplier=0.1)
    except UnsupportedError as error:
        with pytest.raises(UnsupportedError, match=re.escape(str(error))):
            look(kind, estimate, method=method, noise_multiplier=0.1)
        return
    predicted = look(kind, estimate, method=method, noise_multiplier=0.1)

    assert predicted.peak_allocated_bytes == recorded.peak_allocated_bytes
    assert predicted.at_peak == recorded.at_peak


def test_every_layer_with_parameters_is_here() -> None:
    experiment = make_experiment(**FEW)
    here = {type(one) for build in KINDS.values() for one in build(experiment)[0].modules()}
    classes = [one for one in vars(nn).values() if isinstance(one, type)]
    layers = {one for one in classes if issubclass(one, nn.Module) and makes_parameters(one)}

    assert len(layers) > 20
    assert layers - here == set(NOT_HERE)


def makes_parameters(layer: type) -> bool:
    """Whether a class of torch.nn makes parameters itself, and not once it has seen an input."""
    of_torch = [one for one in layer.__mro__ if one.__module__.startswith("torch.nn.modules")]
    made = [one.__init__ for one in of_torch if "__init__" in vars(one)]
    is_lazy = layer.__name__.startswith("Lazy")
    return not is_lazy and any("Parameter(" in inspect.getsource(one) for one in made)


@pytest.mark.parametrize(
    ("kind", "fields", "operators"),
    [
        ("Conv2d", {}, ["convolution", "convolution_backward"]),
        ("EmbeddingBag-sum", {}, ["_embedding_bag", "_embedding_bag_backward"]),
        ("svdvals", {}, ["_linalg_svd"]),
        ("LSTM", {"target": "h100", "device": "cuda"}, ["lstm"]),
        ("GRU", {"target": "h100", "device": "cuda"}, ["gru"]),
        ("LSTM", {}, []),
        ("Linear", {}, []),
    ],
)
def test_what_is_not_modelled_is_named(kind, fields, operators) -> None:
    memory = look(kind, estimate, **fields)

    assert [*find_unknown_workspaces(memory.assumed)] == operators
    for name in operators if not fields else []:
        assert re.search(rf"\b{name}\b", memory.attribution.reason)


def test_the_text_names_what_is_not_modelled() -> None:
    text = str(dpprof.estimate(KINDS["Conv2d"], "standard", **FEW))
    assert "workspace of convolution, convolution_backward: nearly known" in text
    assert "workspace of" not in str(dpprof.estimate(KINDS["LSTM"], "standard", **FEW))


def test_a_loop_over_elements_is_refused_by_name() -> None:
    def build(experiment):
        layer = nn.LSTM(4, 8, batch_first=True)

        def losses(x):
            lengths = [len(x)] * len(x)
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
            return layer(packed)[1][0][0].square().mean(1)

        return layer, losses, torch.randn(experiment.batch_size, experiment.batch_size, 4)

    with built_by(build) as experiment, pytest.raises(UnsupportedError, match="_pack_padded"):
        estimate(experiment, lambda _: None)
