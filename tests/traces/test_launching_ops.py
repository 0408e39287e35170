"""Whose time it is, in traces written by hand: two threads, a GPU, known answers."""

from pathlib import Path

import pytest
import yaml

from dpprof.measure.traces.kernel_summary import NoKernelsError, state_kernels
from dpprof.measure.traces.launching_ops import attribute, family_by_kernel
from dpprof.measure.traces.trace_files import NORMS, PHASE, STEP, cover_s, parse_trace, read_trace

KERNELS = yaml.safe_load(Path(__file__).with_name("kernel_names.yaml").read_text())
MAIN, AUTOGRAD, STREAM = 1, 2, 7


def host(name, start, end, thread=MAIN, kind="cpu_op"):
    times = {"ts": start, "dur": end - start}
    return {"ph": "X", "cat": kind, "name": name, "pid": 10, "tid": thread, **times, "args": {}}


def note(name, start, end):
    return host(name, start, end, kind="user_annotation")


def launch(correlation, start, end, thread=MAIN, name="cudaLaunchKernel"):
    kind = "cuda_driver" if name.startswith("cu") and name[2] == "L" else "cuda_runtime"
    return host(name, start, end, thread, kind) | {"args": {"correlation": correlation}}


def kernel(name, correlation, start, end, kind="kernel", **args):
    span = host(name, start, end, STREAM, kind)
    return span | {"pid": 0, "args": {"correlation": correlation, **args}}


def read(*events):
    return read_trace({"traceEvents": list(events)})


GPU_STEP = [
    note(STEP, 0, 1000),
    note(f"{PHASE}forward", 0, 100),
    host("aten::linear", 10, 60),
    host("aten::addmm", 12, 58),
    launch(1, 20, 25),
    kernel("sm90_xmma_gemm_f32f32", 1, 40, 140),
    # A reduction that the product of matrices launched is part of the product.
    launch(2, 30, 35),
    kernel("splitKreduce_kernel", 2, 140, 150),
    note(f"{PHASE}backward", 100, 500),
    # Backward has a thread of its own; the phase goes by the clock.
    host("autograd::engine::evaluate_function: AddmmBackward0", 110, 300, AUTOGRAD),
    host("aten::mm", 120, 150, AUTOGRAD),
    launch(3, 130, 135, AUTOGRAD),
    kernel("nvjet_tst_64x8", 3, 150, 250),
    host(NORMS, 160, 290, AUTOGRAD, "user_annotation"),
    host("aten::einsum", 165, 200, AUTOGRAD),
    host("aten::bmm", 170, 195, AUTOGRAD),
    launch(4, 180, 185, AUTOGRAD, "cuLaunchKernelEx"),
    kernel("cutlass_gemm", 4, 250, 300),
    note(f"{PHASE}clip", 500, 600),
    host("aten::einsum", 505, 560),
    host("aten::bmm", 510, 550),
    launch(5, 520, 525),
    kernel("cutlass_gemm", 5, 540, 580),
    host("aten::mul", 570, 590),
    launch(6, 575, 580),
    kernel("vectorized_elementwise_kernel", 6, 600, 610),
    note(f"{PHASE}step", 600, 900),
    host("aten::_fused_adamw_", 610, 700),
    launch(7, 620, 630),
    kernel("multi_tensor_apply_kernel", 7, 700, 800),
    # Nobody known launched this one; its name tells.
    launch(8, 910, 915),
    kernel("void at::native::reduce_kernel<512>", 8, 920, 930),
    launch(9, 940, 945, name="cudaMemcpyAsync"),
    kernel("Memcpy HtoD (Pageable -> Device)", 9, 950, 960, "gpu_memcpy", bytes=4096),
]


def test_kernels_belong_to_the_operator_that_launched_them() -> None:
    found = [(one.op_kind, one.phase, one.op) for one in attribute(read(*GPU_STEP), on_cuda=True)]

    assert found == [
        ("gemm", "forward", "aten::addmm"),
        ("gemm", "forward", "aten::addmm"),
        ("gemm", "backward", "aten::mm"),
        ("norm", "backward", "aten::bmm"),
        ("einsum", "clip", "aten::bmm"),
        ("clip", "clip", "aten::mul"),
        ("optimizer", "step", "aten::_fused_adamw_"),
        ("reduce", None, None),
        ("copy", None, None),
    ]


def test_the_times_of_a_step_add_up() -> None:
    told = state_kernels(read(*GPU_STEP), on_cuda=True)

    us = pytest.approx
    busy = 110 + 150 + 40 + 10 + 100 + 10 + 10
    assert told["steps"] == 1
    assert told["step_s"] * 1e6 == us(1000)
    assert told["total_s"] * 1e6 == us(busy)
    assert sum(told["by_op_kind"].values()) * 1e6 == us(busy)
    assert told["by_op_kind"]["gemm"] * 1e6 == us(110 + 100)
    assert {phase: s * 1e6 for phase, s in told["by_phase"].items()} == {
        "forward": us(110),
        "backward": us(150),
        "clip": us(50),
        "step": us(100),
    }
    assert told["idle_s"] * 1e6 == us(1000 - busy)
    copied = told["copies"]["HtoD"]
    assert (copied.bytes, copied.copies) == (4096, 1)


def test_waiting_is_where_the_next_kernel_was_not_launched_yet() -> None:
    """Of the gaps in GPU_STEP, by hand: those before kernels that were launched within them."""
    before = {"1": 40, "5": 240, "6": 0, "7": 90, "8": 120, "9": 20}
    # Kernel 6 was launched (575) while 5 ran, so its gap of 20 us is no wait.
    told = state_kernels(read(*GPU_STEP), on_cuda=True)

    assert told["waiting_s"] * 1e6 == pytest.approx(sum(before.values()))


def test_kernels_of_two_streams_at_once_are_busy_once() -> None:
    events = [
        note(STEP, 0, 100),
        launch(1, 1, 2),
        launch(2, 3, 4),
        kernel("gemm", 1, 10, 60),
        kernel("gemm", 2, 30, 80),
    ]
    told = state_kernels(read(*events), on_cuda=True)

    assert told["total_s"] * 1e6 == pytest.approx(100)
    assert told["idle_s"] * 1e6 == pytest.approx(30)


def test_what_ran_before_the_traced_steps_does_not_count() -> None:
    early = [launch(1, 0, 1), kernel("gemm", 1, 5, 500)]
    late = [note(STEP, 600, 700), launch(2, 610, 620), kernel("gemm", 2, 630, 640)]
    told = state_kernels(read(*early, *late), on_cuda=True)

    assert told["total_s"] * 1e6 == pytest.approx(10)


def test_a_trace_without_work_is_refused() -> None:
    with pytest.raises(ValueError, match="no step in which anything ran"):
        state_kernels(read(note(STEP, 0, 10), host("aten::view", 1, 2)), on_cuda=False)


def test_without_kernels_a_gpus_trace_tells_no_times_of_the_host() -> None:
    """As when CUPTI may not trace: the host's spans are there, and nothing of the device."""
    of_host = [one for one in GPU_STEP if one["cat"] in ("cpu_op", "user_annotation")]
    trace = read(*of_host)

    assert attribute(trace, on_cuda=True) == []
    assert len(attribute(trace, on_cuda=False)) > 3
    with pytest.raises(NoKernelsError, match=r"the trace has no GPU kernel; .* where CUPTI"):
        state_kernels(trace, on_cuda=True)


def test_a_look_at_a_number_is_the_copy_of_what_looked() -> None:
    events = [
        note(STEP, 0, 1000),
        note(f"{PHASE}clip", 0, 900),
        host("aten::item", 10, 60),
        host("aten::_local_scalar_dense", 12, 58),
        launch(1, 20, 25, name="cudaMemcpyAsync"),
        kernel("Memcpy DtoH (Device -> Pinned)", 1, 30, 40, "gpu_memcpy", bytes=4),
        # A call from outside of operators has none.
        launch(2, 70, 75),
        kernel("something_new", 2, 80, 90),
    ]
    found = attribute(read(*events), on_cuda=True)

    assert [(one.op, one.op_kind) for one in found] == [
        ("aten::_local_scalar_dense", "clip"),
        (None, "clip"),
    ]


CPU_STEP = [
    note(STEP, 0, 1000),
    note(f"{PHASE}forward", 0, 400),
    host("aten::embedding", 10, 110),
    # What a lookup is made of is the lookup.
    host("aten::index_select", 20, 100),
    host("aten::view", 120, 130),
    host("aten::softmax", 140, 250),
    host("aten::_softmax", 150, 240),
    note(f"{PHASE}noise", 400, 800),
    host("aten::normal", 410, 510),
    host("aten::empty", 415, 420),
    host("dpprof_test::unheard_of", 600, 640),
]


def test_on_a_cpu_the_outermost_operator_that_works_counts() -> None:
    found = attribute(read(*CPU_STEP), on_cuda=False)

    assert [(one.name, one.op_kind, one.phase) for one in found] == [
        ("aten::embedding", "indexing", "forward"),
        ("aten::_softmax", "reduce", "forward"),
        ("aten::normal", "random", "noise"),
    ]
    told = state_kernels(read(*CPU_STEP), on_cuda=False)
    assert told["total_s"] * 1e6 == pytest.approx(100 + 90 + 100)
    assert told["idle_s"] * 1e6 == pytest.approx(1000 - 290)
    assert told["waiting_s"] is None


@pytest.mark.parametrize("family", KERNELS)
def test_families_by_the_name_of_a_kernel(family) -> None:
    found = {name: family_by_kernel(name) for name in KERNELS[family]}

    assert found == dict.fromkeys(KERNELS[family], family)


def test_the_operator_decides_and_the_kernel_where_it_is_unknown() -> None:
    """Whatever phase it runs in, communication stays communication."""
    names = [
        ("aten::mul", "sm90_xmma_gemm_f32f32", "elementwise"),
        ("aten::_fft_r2c", "triton_red_fused_sum_0", "reduce"),
        ("aten::_fused_adam_", "multi_tensor_apply_kernel", "optimizer"),
        ("c10d::allreduce_", "Memcpy DtoD (Device -> Device)", "communication"),
        ("vllm::all_reduce", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "communication"),
    ]
    events = [note(STEP, 0, 1000), note(f"{PHASE}step", 500, 1000)]
    for i, (op, name, _) in enumerate(names * 2):
        at = 100 * i
        events += [host(op, at, at + 90), launch(i, at + 10, at + 20)]
        events += [kernel(name, i, at + 30, at + 40)]
    found = [one.op_kind for one in attribute(read(*events), on_cuda=True)]

    assert found[:5] == [kind for *_, kind in names]
    assert found[5:] == ["optimizer"] * 3 + ["communication"] * 2


def test_what_is_no_number_becomes_null() -> None:
    text = b'{"traceEvents": [{"a": nan, "b": [1, 2], "c": -inf}, {"d": "x: nan, y"}], "e": inf}'

    assert parse_trace(text) == {
        "traceEvents": [{"a": None, "b": [1, 2], "c": None}, {"d": "x: nan, y"}],
        "e": None,
    }


def test_spans_that_overlap_are_covered_once() -> None:
    assert cover_s([(0, 10), (2, 4), (8, 12), (20, 21)]) == 13
