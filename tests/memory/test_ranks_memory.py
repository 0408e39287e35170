"""Each rank's ledger is what its allocator counts, and the estimate for rank 0 is that ledger."""

import gc
from collections.abc import Callable, Iterator

import pytest
import torch
from factory import make_experiment

from dpprof.instruments import memory, phases
from dpprof.records.reconciliation import bound_bytes
from dpprof.records.result import Measurement
from dpprof.spec.experiment import Experiment

pytestmark = pytest.mark.filterwarnings("ignore")

MODELS = {
    "ours": {"vocab_size": 1000, "d_model": 64, "layers": 3, "heads": 4},
    "gpt2": {"hf": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 2, "vocab_size": 301},
    "llama": {"hf": "llama-3.2-1b", "hidden_size": 64, "intermediate_size": 96}
    | {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    | {"vocab_size": 301, "head_dim": 16},
}
"""Sizes that neither 2 nor 4 divides, tied weights, and layers with biases and without."""

UNKNOWN_BYTES = 64

QUICK = [
    ("ours", "flash-bk", "kind=fsdp,world_size=2", {"checkpointing": "non-reentrant"}),
    ("llama", "flash", "kind=fsdp,world_size=2,reshard_after_forward=true", {}),
    ("gpt2", "standard", "kind=ddp,world_size=2", {"dtype": "bfloat16"}),
]
"""Each model, method and kind once; the products of all are slow."""
EVERY = [
    (model, method, f"kind={kind},world_size={size}", {"dtype": dtype})
    for size in (2, 4)
    for model in MODELS
    for method in ("standard", "flash", "flash-bk")
    for kind in ("ddp", "fsdp")
    for dtype in ("float32", "bfloat16")
]


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """As each rank has: workspaces of kernels depend on it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def record(spec: str, instrument: Callable[..., Measurement] = memory.measure) -> Measurement:
    gc.collect()  # a sharded model refers to itself
    return instrument(Experiment.model_validate_json(spec), lambda _: None)


@pytest.mark.parametrize(
    ("model", "method", "parallel", "others"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in EVERY)],
)
def test_a_rank_holds_what_its_allocator_counts_and_what_was_predicted(
    pools, model, method, parallel, others
) -> None:
    experiment = make_experiment(
        **{"model": MODELS[model], "method": method, "seq_len": 24, "parallel": parallel}
        | {"warmup_steps": 2}
        | others
    )
    ledgers = pools[experiment.world_size].compute(record, experiment.model_dump_json())
    followed = pools[experiment.world_size].compute(
        record, experiment.model_dump_json(), phases.measure
    )
    predicted = memory.estimate(experiment, lambda _: None)

    first = ledgers[0].memory
    assert predicted.memory.peak_allocated_bytes == first.peak_allocated_bytes
    assert predicted.memory.at_peak.components == first.at_peak.components
    assert predicted.memory.first_step_peak_allocated_bytes == (
        first.first_step_peak_allocated_bytes
    )
    assert predicted.communication == ledgers[0].communication
    for ledger, told in zip(ledgers, followed, strict=True):
        assert ledger.memory.at_peak.components["unattributed"] <= UNKNOWN_BYTES
        peak = told.memory.peak_allocated_bytes
        assert abs(peak - ledger.memory.peak_allocated_bytes) <= bound_bytes(experiment, peak)


def test_what_ranks_hold_has_names(pools) -> None:
    fields = {"model": MODELS["ours"], "method": "flash-bk", "parallel": "kind=fsdp,world_size=2"}
    experiment = make_experiment(**fields)
    parameters_bytes = 4 * 278_336

    [found, _] = pools[2].compute(record, experiment.model_dump_json())

    held = found.memory.at_peak.components
    assert found.model.parameters_bytes == parameters_bytes
    assert held["parameters"] == parameters_bytes // 2
    assert 0 < held["unsharded_parameters"] <= parameters_bytes
    assert found.memory.timeline.components["unsharded_gradients"]
    assert found.memory.timeline.components["communication_buffers"]
