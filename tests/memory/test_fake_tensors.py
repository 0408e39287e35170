"""Under fake tensors the timeline is the same, to the byte."""

import pytest
import torch
from factory import make_experiment
from fresh_process import run_fresh
from memory_steps import costs, executed, keep_once, record_and_estimate, trace_call, workspaces
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from dpprof.experiments.config import registry
from dpprof.experiments.records.step_costs import Memory
from dpprof.predict import plain_step
from dpprof.predict import tracing as tracing_module
from dpprof.predict.estimate import estimate, trace_steps
from dpprof.predict.flops.cost import COUNTED
from dpprof.predict.memory import simulated_cuda, summary
from dpprof.predict.memory.fake_tensors import fake_tensors
from dpprof.predict.tracing import state_estimate, tracing
from dpprof.private.errors import UnsupportedError
from dpprof.private.noise.noise import DRAWN_IN_TURN
from dpprof.subjects.methods.standard import Standard
from dpprof.subjects.setup import set_up

MODEL = {"vocab_size": 50, "d_model": 16, "layers": 1, "heads": 2}
LONG = MODEL | {"vocab_size": DRAWN_IN_TURN // 16 + 1}
"""Whose embedding is so long that several threads draw its noise."""
QUICK = [
    ("flash-bk", {"model": LONG}),
    ("standard", {"optimizer": "sgd"}),
    ("opacus-ew", {}),
    ("opacus-ghost", {"attention": "opacus"}),
    ("opacus-hooks", {"dtype": "bfloat16"}),
]
SLOW = [(method, {}) for method in registry.names("methods") if (method, {}) not in QUICK]
SLOW += [(method, {"model": LONG}) for method in ("flash", "per-layer", "microbatch")]
SLOW += [("opacus-ghost", {"attention": "eager"}), ("opacus-hooks", {"dtype": "float64"})]


def make(method: str, **fields):
    return make_experiment(
        **{"model": MODEL, "method": method, "batch_size": 3, "seq_len": 32}
        | {"noise_multiplier": 0.1}  # more, and adaptive clipping would ask for more samples
        | fields
    )


@pytest.mark.parametrize(
    ("method", "fields"),
    [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
    ids=str,
)
def test_an_estimate_equals_what_is_recorded(method, fields) -> None:
    real, fake = record_and_estimate(make(method, **fields))

    assert fake.memory.attribution == real.memory.attribution
    if method in ("opacus-ghost", "opacus-adaptive"):
        # A token that occurs twice in a sample spares a few additions.
        assert 0 <= fake.compute.other_flops - real.compute.other_flops < 10_000
        of_real = {"other_flops": real.compute.other_flops}
        assert fake.compute.model_copy(update=of_real) == real.compute
    else:
        assert fake.compute == real.compute
        assert fake.io == real.io
    assert fake.samplers == real.samplers


def test_the_timeline_keeps_every_components_maximum() -> None:
    memory = record_and_estimate(make("opacus-ghost", attention="opacus"))[0].memory
    line = memory.timeline
    totals = [sum(row) for row in zip(*line.components.values(), strict=True)]
    highest = totals.index(max(totals))

    assert max(totals) == memory.peak_allocated_bytes
    assert line.phase[highest] == memory.at_peak.phase
    assert {c: sizes[highest] for c, sizes in line.components.items() if sizes[highest]} == {
        c: size for c, size in memory.at_peak.components.items() if size
    }
    assert line.ops == sorted(line.ops)
    assert line.elapsed_s == sorted(line.elapsed_s)
    assert [op is None for op in line.op] == [not ops for ops in line.ops]
    noise = {op for op, phase in zip(line.op, line.phase, strict=True) if phase == "noise"}
    assert {"normal", "zeros"} < noise
    phases = ["step", "forward", "backward", "clip", "second_backward", "noise"]
    assert list(dict.fromkeys(line.phase)) == phases  # it begins where the last step ended
    assert line.phase[-1] == "step"


def test_nothing_is_patched_afterwards() -> None:
    apply = nn.Module._apply
    with fake_tensors(), simulated_cuda.like_cuda("9.0"):
        assert nn.Module._apply is not apply

    assert nn.Module._apply is apply
    assert "__deepcopy__" not in vars(FakeTensorMode)
    assert type(torch.ones(1)) is torch.Tensor


@pytest.mark.parametrize(
    "look", [lambda gradient: gradient.norm().item() > 1, lambda gradient: gradient.nonzero()]
)
def test_a_method_that_needs_elements_is_unsupported_in_one_sentence(look, monkeypatch) -> None:
    class Looks(Standard):
        def compute_gradient(self, batch, enter) -> None:
            super().compute_gradient(batch, enter)
            look(self.module.head.weight.grad)

    monkeypatch.setattr(tracing_module, "import_method", lambda _: Looks)
    with pytest.raises(UnsupportedError, match=r"^it needs the elements of a tensor \(aten\.\w+"):
        estimate(make("standard"), lambda _: None)

    assert torch.ones(1).item() == 1


def test_a_model_whose_layers_are_not_known_has_no_model_flops_and_says_why(monkeypatch) -> None:
    monkeypatch.setattr(plain_step, "find_attention_size", lambda *_: None)
    compute = estimate(make("standard"), lambda _: None).compute
    of_hugging_face = make("standard", model="hf:tiny-gpt2")

    assert compute.model_flops is compute.dp_flop_multiplier is None
    assert compute.reason.startswith("the formula is of transformers, and the layers")
    assert compute.executed_flops > 0
    assert summary._explain_unknown(of_hugging_face, None, None, keep_once("standard")).startswith(
        "the formula holds for no experts, no convolutions, and no layers without"
    )


MEASURE = """
import sys
from dpprof.experiments.config import registry
from dpprof.experiments.config.experiment import Experiment
experiment = Experiment.model_validate_json(sys.argv[1])
measured = registry.load("instruments", sys.argv[2])(experiment, lambda _: None)
print(measured.memory.model_dump_json())
"""
"""In a process of its own: an allocator keeps what earlier experiments left."""


@pytest.mark.gpu
@pytest.mark.parametrize("method", registry.names("methods"))
def test_on_cuda_memory_is_reconciled_and_the_estimate_is_near(method) -> None:
    fields = {"model": "small", "method": method, "batch_size": 4, "seq_len": 256}
    experiment = make_experiment(**fields, noise_multiplier=0.1, device="cuda")
    real, bare, fake = (
        Memory.model_validate_json(run_fresh(MEASURE, experiment.model_dump_json(), instrument))
        for instrument in ("memory", "clean", "estimate")
    )

    assert real.attribution.valid, real.attribution.reason
    assert real.attribution.allocator_peak_bytes > 0
    assert fake.peak_allocated_bytes == pytest.approx(bare.peak_allocated_bytes, rel=0.005)


def test_a_gpu_takes_blocks_workspaces_and_all_roots_at_once() -> None:
    fields = {"model": MODEL | {"vocab_size": 2000}, "batch_size": 1, "seq_len": 4}
    cpu, gpu = (
        estimate(make("standard", **fields | place), lambda _: None)
        for place in ({}, {"target": "h200", "device": "cuda"})
    )
    components = gpu.memory.at_peak.components

    assert all(size % 512 == 0 for size in components.values())
    assert components["workspace"] >= 2 * 32 * 2**20
    # AdamW's square roots of all second moments are there at once, not one after another.
    assert gpu.memory.at_peak.op == "_foreach_sqrt"
    assert cpu.memory.at_peak.op != "_foreach_sqrt"
    assert gpu.compute.roofline_step_s > 0
    assert cpu.compute.roofline_step_s is None


def test_a_gpu_takes_workspaces_of_libraries_and_buffers_of_reductions() -> None:
    def run() -> None:
        x = torch.ones(4096, 5120, requires_grad=True)
        (x @ torch.ones(5120, 3)).sum().backward()
        x.sum(0)

    recorder = trace_call("h200", run)
    taken = workspaces(recorder)

    assert taken.count(32 * 2**20) == 2
    assert sum(taken) > 164 * 2**20
    assert all(one.nbytes % 512 == 0 for one in recorder.storages)


@pytest.mark.parametrize(
    "dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow), "float64"]
)
def test_on_a_gpu_flash_clipping_finds_norms_by_kernels(dtype) -> None:
    fields = {"method": "flash", "dtype": dtype, "seq_len": 300, "batch_size": 2, "model": "tiny"}
    experiment = make_experiment(**fields, target="h200", device="cuda")
    with tracing(registry.load("targets", "h200")) as recorder:
        method = registry.load("methods", "flash")
        training = set_up(experiment, method, torch.device("cpu"), lambda *_: None)
        recorder.counting = True
        training.step.run(training.batch, lambda _: None)
    plan = training.step.norm_plan.values()
    planned = sum(one.flops for one in plan if one.way == "tiled product")
    flops = sum(cost.flops for cost in costs(recorder) if cost.op == "dpprof.product_squares")

    assert planned > 2 * 300 * 64 * 1000
    assert flops == (0 if dtype == "float64" else 2 * planned)


def test_dropout_keeps_a_mask_of_bytes_on_a_gpu() -> None:
    recorder = trace_call("l4", lambda: nn.functional.dropout(torch.ones(1024), 0.5))

    sizes = [one.nbytes for one in recorder.storages if one.op == "native_dropout"]
    assert sorted(sizes) == [1024, 4096]


def run_autocast() -> None:
    layer, x = nn.LayerNorm(1024), torch.ones(64, 1024, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        layer(x), x.sum(dim=1), torch.sum(x), x.sum(0, dtype=torch.bfloat16)


@pytest.mark.parametrize(("target", "norm", "sums"), [(None, 2, [2, 2, 2]), ("h100", 4, [4, 4, 2])])
def test_autocast_computes_norms_and_sums_in_float32_on_a_gpu_alone(target, norm, sums) -> None:
    """And sums without a copy of what they sum."""
    made = {"native_layer_norm": [], "sum": [], "_to_copy": []}
    for one in trace_call(target, run_autocast).storages:
        made.setdefault(one.op, []).append(one.requested)

    assert made["native_layer_norm"][0] == 64 * 1024 * norm
    elements = (64, 1, 1024)
    assert made["sum"] == [size * count for size, count in zip(sums, elements, strict=True)]
    assert made["_to_copy"].count(64 * 1024 * 4) == (1 if target else 0)  # of the norm's input


@pytest.mark.slow
def test_book_keeping_of_a_billion_parameters_costs_hardly_more_than_plain_training() -> None:
    fields = {"model": "1b", "batch_size": 4, "seq_len": 2048, "dtype": "bfloat16"}
    fields |= {"target": "h100", "device": "cuda"}
    experiments = [make(method, **fields) for method in ("standard", "flash-bk")]
    traced = [trace_steps(one, lambda _: None) for one in experiments]
    plain, private = map(state_estimate, traced, experiments)
    ops = traced[1].steady.ops
    in_float32 = [op.cost for op in ops if op.cost.dtype == "float32"]
    products = sum(cost.flops for cost in in_float32 if cost.family in COUNTED)

    assert private.memory.peak_allocated_bytes <= 1.02 * plain.memory.peak_allocated_bytes
    assert private.compute.roofline_step_s <= 1.25 * plain.compute.roofline_step_s
    assert len(ops) <= 6_000
    assert products <= 0.05 * executed(traced[1].steady)
