"""Each rank's ledger is what its allocator counts, and the estimate for rank 0 is that ledger."""

import functools
import gc
from collections.abc import Callable

import pytest
from factory import make_experiment

from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.records.reconciliation import bound_bytes
from dpprof.experiments.records.result import Measurement
from dpprof.measure.instruments import memory, phases
from dpprof.predict.estimate import estimate

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("one_thread")]

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
    ("ours", "standard", "kind=ddp,world_size=2", {"dtype": "bfloat16", "accumulation": 4}),
]
"""Each kind once; the products of all are slow."""
EVERY = [
    (model, method, f"kind={kind},world_size={size}", {"dtype": dtype})
    for size in (2, 4)
    for model in MODELS
    for method in ("standard", "flash", "flash-bk")
    for kind in ("ddp", "fsdp")
    for dtype in ("float32", "bfloat16")
]
EVERY += [("llama", "flash", "kind=fsdp,world_size=2,reshard_after_forward=true", {})]
EVERY += [
    (model, method, f"kind={kind},world_size=2{exchange}", {"accumulation": 4, "dtype": dtype})
    for model in ("gpt2", "llama")
    for kind in ("ddp", "fsdp")
    for dtype in ("float32", "bfloat16")
    for method, exchange in (("standard", ""), ("standard", ",exchange=each"), ("flash-bk", ""))
]
EVERY += [
    ("llama", "standard", f"kind=fsdp,world_size={size}", {"lora": "rank=2", "quantization": name})
    for size in (2, 4)
    for name in ("nf4", "nf4-double")
]


def record(spec: str, instrument: Callable[..., Measurement] = memory.measure) -> Measurement:
    gc.collect()  # a sharded model refers to itself
    return instrument(Experiment.model_validate_json(spec), lambda _: None)


def make(model, method, parallel, others) -> Experiment:
    fields = {"model": MODELS[model], "method": method, "seq_len": 24, "parallel": parallel}
    return make_experiment(**fields | {"warmup_steps": 2} | others)


@pytest.fixture(scope="module")
def ledgers(pools):
    """Record an experiment on every rank, once for all tests."""
    return functools.cache(
        lambda experiment: pools[experiment.world_size].compute(
            record, experiment.model_dump_json()
        )
    )


@pytest.mark.parametrize(
    "case", [*QUICK, *(pytest.param(case, marks=pytest.mark.slow) for case in EVERY)], ids=str
)
def test_a_rank_holds_what_its_allocator_counts_and_what_was_predicted(
    pools, ledgers, case
) -> None:
    experiment = make(*case)
    ranks = ledgers(experiment)
    followed = pools[experiment.world_size].compute(
        record, experiment.model_dump_json(), phases.measure
    )
    predicted = estimate(experiment, lambda _: None)

    for part in ("peak_allocated_bytes", "first_step_peak_allocated_bytes"):
        assert getattr(predicted.memory, part) == getattr(ranks[0].memory, part)
    assert predicted.memory.at_peak.components == ranks[0].memory.at_peak.components
    assert predicted.communication == ranks[0].communication
    for ledger, by_allocator in zip(ranks, followed, strict=True):
        assert ledger.memory.at_peak.components["unattributed"] <= UNKNOWN_BYTES
        peak = by_allocator.memory.peak_allocated_bytes
        assert abs(peak - ledger.memory.peak_allocated_bytes) <= bound_bytes(experiment, peak)


def test_what_ranks_hold_has_names(ledgers) -> None:
    found = ledgers(make(*QUICK[0]))[0]
    parameters_bytes = 4 * 279_616

    held = found.memory.timeline.components
    assert found.model.parameters_bytes == parameters_bytes
    assert max(held["parameters"]) == parameters_bytes // 2
    assert 0 < max(held["unsharded_parameters"]) <= parameters_bytes
    assert held["unsharded_gradients"]
    assert held["communication_buffers"]
