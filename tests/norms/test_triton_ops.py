"""Kernels count as operators: fake tensors have their shape, counters their FLOPs."""

import sys
from types import ModuleType

import pytest
import torch
from factory import make_experiment
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from dpprof.measure.instruments.clean import measure
from dpprof.predict.flops.op_costs import learn_rule
from dpprof.private.norms import linear, triton_ops
from dpprof.private.norms.linear import WAYS


@pytest.mark.parametrize(
    ("operator", "shape", "flops"),
    [
        # 2 for each pair t >= s, and each column
        (triton_ops.gram_squares, (5, 3), 3 * 10 * 11 * (4 + 5)),
        (triton_ops.product_squares, (3,), 3 * 2 * 10 * 4 * 5),
    ],
    ids=["gram", "product"],
)
def test_shape_dtype_and_flops_without_a_device(operator, shape, flops) -> None:
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        squares = operator(*(torch.empty(3, 10, width, dtype=torch.bfloat16) for width in (4, 5)))

    assert (squares.shape, squares.dtype) == (shape, torch.float32)
    assert counter.get_total_flops() == flops


@pytest.mark.parametrize(("shifted", "rows"), [(False, 1), (True, 2)])
def test_a_scales_gradient_has_a_shape_without_a_device_and_moves_each_input_once(
    shifted, rows
) -> None:
    rule = learn_rule(triton_ops.SCALE.default)
    with FakeTensorMode():
        x_BTd = torch.empty(3, 10, 4, dtype=torch.bfloat16)
        given = (x_BTd, x_BTd, torch.empty(3, 10), torch.empty(3, 10), shifted)
        sums_BRd = triton_ops.scale_gradients(*given)
        cost, reads, writes = rule.price(given, {}, sums_BRd)

    assert (sums_BRd.shape, sums_BRd.dtype) == ((3, rows, 4), torch.float32)
    assert (cost.family, cost.op) == ("reduction", "dpprof.scale_gradients")
    assert sum(size for _, size in reads) == 2 * (3 * 10 * 4) * 2 + 2 * (3 * 10) * 4
    assert sum(size for _, size in writes) == 3 * rows * 4 * 4


def test_tensors_of_a_cpu_take_the_tiles() -> None:
    assert not triton_ops.is_fused(torch.ones(1, 1, 1))


class Driver:
    """Triton's, on a machine where its part in C cannot be compiled."""

    tries = 0

    @property
    def active(self):
        Driver.tries += 1
        raise RuntimeError("Failed to find C compiler. Please specify via CC\nor otherwise")


@pytest.fixture
def uncompiled(monkeypatch):
    """Triton as it is where there is no C compiler, or no Python.h."""
    runtime = ModuleType("triton.runtime")
    runtime.driver = Driver()
    monkeypatch.setitem(sys.modules, "triton.runtime", runtime)
    monkeypatch.setattr(Driver, "tries", 0)
    triton_ops.why_no_kernels.cache_clear()
    yield
    triton_ops.why_no_kernels.cache_clear()


@pytest.fixture
def timed(monkeypatch):
    """Kernels that are interpreted by nobody, and timed as said; tells what was run."""
    ran = []
    tuning = ModuleType("dpprof.private.norms.tuning")
    times_ms = {}

    def time_launch(run, quantiles):
        before = len(ran)
        run()
        return [times_ms["kernel" if "kernel" in ran[before:] else "products"] for _ in quantiles]

    def run_kernel(kernel, x_BTd, g_BTp):
        ran.append("kernel")
        triton_ops._tiles[kernel, *x_BTd.shape[1:], g_BTp.shape[2]] = {"TILE_T": 64}
        return x_BTd.new_ones((5, len(x_BTd)) if kernel == "gram_squares" else len(x_BTd))

    tuning.time_launch = time_launch
    monkeypatch.setitem(sys.modules, "dpprof.private.norms.tuning", tuning)
    monkeypatch.setattr(triton_ops, "_run", run_kernel)
    monkeypatch.setattr(triton_ops, "_tiles", {})
    monkeypatch.setattr(triton_ops, "_is_faster", {})
    monkeypatch.setattr(linear, "is_fused", lambda _: True)
    return times_ms, ran


@pytest.mark.parametrize("way", ["tiled gram", "tiled product"])
@pytest.mark.parametrize("is_kernel", [True, False])
def test_exact_norms_of_float32_take_whichever_was_faster(timed, way, is_kernel) -> None:
    times_ms, ran = timed
    times_ms |= {"kernel": 1.0, "products": 2.0 if is_kernel else 0.5}

    for _ in range(3):
        WAYS[way](torch.randn(3, 10, 4), torch.randn(3, 10, 5))

    assert ran.count("kernel") == (1 + 3 if is_kernel else 1)  # one of them to be timed
    assert (triton_ops.chosen_tiles(way, 10, 4, 5) == {"TILE_T": 64}) == is_kernel
    assert bool(triton_ops.explain_missing_tiles()) == (not is_kernel)


def test_norms_on_tensor_cores_are_not_timed(timed) -> None:
    WAYS["tiled gram"](torch.randn(3, 10, 4).bfloat16(), torch.randn(3, 10, 5).bfloat16())

    assert timed[1] == ["kernel"]


WHY = (
    "Triton's driver cannot be used: RuntimeError: Failed to find C compiler. Please specify via CC"
)


class OnCuda(torch.Tensor):
    """A tensor of the CPU that says it is on CUDA, where a build without CUDA has none."""

    is_cuda = True


@pytest.mark.parametrize("way", ["tiled gram", "tiled product"])
def test_without_a_compiler_norms_on_cuda_take_pytorchs_operators(uncompiled, way) -> None:
    x_BTd, g_BTp = torch.randn(3, 10, 4), torch.randn(3, 10, 5)
    expected_B = WAYS[way](x_BTd, g_BTp).found_B
    assert Driver.tries == 0

    for _ in range(2):
        squares_B = WAYS[way](x_BTd.as_subclass(OnCuda), g_BTp.as_subclass(OnCuda)).found_B
        assert torch.equal(squares_B.as_subclass(torch.Tensor), expected_B)
    assert Driver.tries == 1
    assert triton_ops.explain_missing_tiles() == {"norm_plan.tiles": WHY}


def test_a_result_says_why_kernels_did_not_run(uncompiled) -> None:
    experiment = make_experiment(method="flash")
    assert "norm_plan.tiles" not in measure(experiment, lambda _: None).reasons
    assert Driver.tries == 0  # no tensor was on CUDA

    assert not triton_ops.is_fused(torch.ones(1, 1, 1).as_subclass(OnCuda))
    assert measure(experiment, lambda _: None).reasons["norm_plan.tiles"] == WHY


def test_without_a_gpu_the_real_driver_is_a_reason_and_no_error() -> None:
    pytest.importorskip("triton", reason="the extra dpprof[triton] is not installed")
    if torch.cuda.is_available():
        pytest.skip("a GPU is there")
    triton_ops.why_no_kernels.cache_clear()
    reason = triton_ops.why_no_kernels()
    triton_ops.why_no_kernels.cache_clear()

    assert reason.startswith("Triton's driver cannot be used: ")


def test_a_plan_tells_the_tiles_that_ran(monkeypatch) -> None:
    experiment = make_experiment(method="flash", model={"d_model": 32} | MODEL, seq_len=8)
    chosen = {"TILE_T": 64, "TILE_K": 32, "num_warps": 4, "num_stages": 3}
    monkeypatch.setattr(triton_ops, "_tiles", {("gram_squares", 8, 32, 96): chosen})
    plan = measure(experiment, lambda _: None).norm_plan
    grams = {
        (one.inputs, one.outputs): one.tiles for one in plan.values() if one.way == "tiled gram"
    }

    assert grams[32, 96] == chosen
    assert grams[32, 128] is None


MODEL = {"vocab_size": 50, "layers": 1, "heads": 2}
