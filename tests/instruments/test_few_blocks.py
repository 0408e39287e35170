"""A step of many blocks, assembled from traces of few, is the step of the traced whole."""

import itertools

import pytest
from factory import make_experiment

from dpprof.predict.estimate import estimate
from dpprof.predict.tracing import state_estimate, trace_whole
from dpprof.subjects.setup import import_method

DIMENSIONS = {"vocab_size": 211, "d_model": 32, "layers": 7, "heads": 4}
OWN = ("standard", "flash", "flash-bk", "per-layer", "microbatch")
OPACUS = tuple(
    f"opacus-{name}"
    for name in ("hooks", "functorch", "ew", "ghost", "fast-gradient-clipping", "per-layer")
)
HUGGING_FACE = ("gpt2", "llama", "qwen2", "mistral", "gpt-neox", "opt", "phi", "gemma2")
ON_THIS_CPU = {"device": "cpu", "target": "cpu"}
FIRST = (
    {"method": "opacus-fast-gradient-clipping", "parallel": "kind=ddp,world_size=4"}
    | {"attention": "opacus"},
    {"method": "standard", "parallel": "kind=fsdp,world_size=8", "dtype": "bfloat16"}
    | {"checkpointing": "reentrant", "target": "l40s", "accumulation": 4},
    {"method": "flash", "hf": "gpt-neox", "lora": "rank=2", "head": "chunked"}
    | {"batch_size": 9, "optimizer": "adamw-fused", "seq_len": 48, "execution": "graph"},
)
"""Every field in which the records of different experiments differ, at least once."""


def _combine():
    """Yield the exhaustive set: more than 150 combinations. Opacus refuses Gemma's embedding."""
    for method, dtype, batch_size in itertools.product(OWN, ("float32", "bfloat16"), (1, 2, 5, 33)):
        yield {"method": method, "dtype": dtype, "batch_size": batch_size}
    for method, batch_size in itertools.product(OPACUS, (1, 2, 5, 33)):
        yield {"method": method, "batch_size": batch_size}
    yield {"method": "opacus-adaptive", "batch_size": 12}
    for method, way in itertools.product(OWN[:3], ("non-reentrant", "reentrant")):
        yield {"method": method, "checkpointing": way, "seq_len": 130}
    for method, kind, size in itertools.product(OWN[:3], ("fsdp", "ddp"), (2, 8, 64)):
        for dtype in ("float32", "bfloat16"):
            yield {"method": method, "parallel": f"kind={kind},world_size={size}", "dtype": dtype}
    for method, hf in itertools.product(("standard", "flash-bk"), HUGGING_FACE):
        yield {"method": method, "hf": hf}
    yield from ({"method": "opacus-hooks", "hf": hf} for hf in HUGGING_FACE if hf != "gemma2")
    for method, hf in itertools.product(("flash-bk", "flash"), HUGGING_FACE):
        yield {"method": method, "hf": hf, "lora": "rank=2", "dtype": "bfloat16"}
    for method, target in itertools.product(OWN[:3], ("h100", "a100", "l40s", "b200")):
        yield {"method": method, "target": target, "optimizer": "sgd", "seq_len": 300}
    for method in (*OWN, *OPACUS):
        yield {"method": method, "attention": "eager", **ON_THIS_CPU}
    yield {"method": "opacus-hooks", "attention": "opacus"}
    yield {"method": "flash-bk", "batch_size": 1, **ON_THIS_CPU}
    yield {"method": "per-layer", "target": "l40s"}
    yield {"method": "microbatch", "batch_size": 3, **ON_THIS_CPU}


def _experiment(case):
    hf = case.get("hf")
    layers = {"gpt2": "n_layer"}.get(hf, "num_hidden_layers")
    model = {"hf": f"hf:tiny-{hf}", layers: 7} if hf else DIMENSIONS
    given = {"model": model, "batch_size": 4, "seq_len": 16, "device": "cuda", "target": "h100"}
    return make_experiment(**given | {name: value for name, value in case.items() if name != "hf"})


def _ignore(_phase) -> None:
    pass


def _compare(case) -> str:
    experiment = _experiment(case)
    import_method(experiment)
    found = estimate(experiment, _ignore)
    whole = state_estimate(trace_whole(experiment, _ignore), experiment)
    said = found.memory.assumed.pop("blocks")
    assert found == whole
    return said


@pytest.mark.parametrize("case", FIRST, ids=str)
def test_the_result_is_that_of_tracing_the_whole(case) -> None:
    assert _compare(case).startswith("the 7 blocks follow from traces of ")


def _combine_executions():
    for method, optimizer in itertools.product(OWN[:3], ("adamw", "adamw-fused", "sgd")):
        for execution in ("eager", "graph"):
            yield {"method": method, "optimizer": optimizer, "execution": execution}
    over = {"hf": "llama", "lora": "rank=2", "dtype": "bfloat16"}
    for method, base in itertools.product(OWN[:3], ("nf4-double", "fp4", "int8")):
        for optimizer, place in (("adamw-8bit", {}), ("adafactor", ON_THIS_CPU)):
            yield {"method": method, **over, "quantization": base, "optimizer": optimizer, **place}
    for method, optimizer in itertools.product(OWN[:3], ("adamw-8bit", "adafactor")):
        yield {"method": method, "optimizer": optimizer}
    for method, batch_size in itertools.product(OWN[:4], (1, 2, 5, 33)):
        yield {"method": method, "head": "chunked", "batch_size": batch_size}
    for kind, exchange in itertools.product(("ddp", "fsdp"), ("last", "each")):
        ranks = f"kind={kind},world_size=4,exchange={exchange}"
        yield {"method": "standard", "parallel": ranks, "accumulation": 3}


@pytest.mark.slow
@pytest.mark.parametrize("case", [*_combine(), *_combine_executions()], ids=str)
def test_every_result_is_that_of_tracing_the_whole(case) -> None:
    _compare(case)
