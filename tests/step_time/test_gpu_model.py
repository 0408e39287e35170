"""The time of an operator on a GPU, and of steps of models that run there."""

import functools
import math

import pytest
from factory import make_experiment

from dpprof.experiments.config.datasheets import A100, A100_PCIE, B200, H100, H100_NVL, H200, L4
from dpprof.experiments.config.target import Target
from dpprof.predict.estimate import estimate
from dpprof.predict.flops.cost import AttentionShape, Cost
from dpprof.predict.step_time import gpu_model
from dpprof.predict.step_time.gpu_model import (
    CAUSAL,
    CONVOLUTIONS,
    KERNEL_S,
    MEMORY,
    MISALIGNED,
    GpuModel,
)
from dpprof.predict.step_time.op_time import Z_90, OpTime
from dpprof.predict.step_time.product_table import read_document

SHAPE = (1, 4096, 8192, 2048)
FLOPS = 2 * 4096 * 8192 * 2048


def product(dtype: str = "bfloat16", shape=SHAPE) -> Cost:
    return Cost("mm", "matmul", 2 * math.prod(shape), dtype, product=shape)


def interval(time: OpTime) -> tuple[float, float]:
    """Return the ends of the 90 % interval."""
    return tuple(time.seconds * math.exp(sign * Z_90 * time.spread) for sign in (-1, 1))


def test_a_product_of_a_measured_shape_takes_what_was_measured() -> None:
    document = read_document("h100")
    m, n, k = (document[name].index(size) for name, size in zip("mnk", SHAPE[1:], strict=True))
    share = document["shares"][m][n][k] / 10_000
    found = GpuModel(H100, "bfloat16").predict(product(), 0)

    assert found.seconds == pytest.approx(FLOPS / 989.4e12 / share + KERNEL_S)
    assert found.basis == "measured at this shape"
    assert 0.6 < share < 0.95


def test_a_device_without_a_table_takes_its_architectures_shares() -> None:
    own, other = (GpuModel(one, "bfloat16").predict(product(), 0) for one in (H100, H100_NVL))

    ratio = (other.seconds - KERNEL_S) / (own.seconds - KERNEL_S)
    assert ratio == pytest.approx(989.4 / 835, rel=1e-3)
    assert (other.basis, other.spread) == ("extrapolated", 2 * own.spread)


def test_an_unknown_architecture_rests_on_the_data_sheet_with_a_wide_interval() -> None:
    board = Target(memory_bytes="1GiB", flops_per_s=1e12, bandwidth_bytes_per_s=1e11)
    board = board.model_copy(update={"compute_capability": "7.5"})
    found = GpuModel(board, "bfloat16").predict(product(), 0)

    assert found.basis == "data sheet"
    low, high = interval(found)
    assert high / low > 3
    assert low < FLOPS / 1e12 / 0.6 < high


def test_without_a_peak_of_the_dtype_no_time_is_predicted_and_the_reason_is_given() -> None:
    board = {"memory_bytes": "1GiB", "bandwidth_bytes_per_s": 1e11, "flops_per_s": {"tf32": 1e12}}
    found, known = (
        estimate(make_experiment(device="cuda", target=board, dtype=dtype), lambda _: None)
        for dtype in ("float32", "tf32")
    )

    assert found.time is None
    assert found.reasons["time"] == "not predicted: the target's flops_per_s has no float32"
    assert known.time.median_s is None
    assert known.reasons["time.median_s"] == "nothing ran; the instrument clean measures it"
    assert "time" not in known.reasons


@pytest.mark.parametrize(
    ("target", "dtype", "size", "tflop_per_s"),
    [
        (H100, "float32", 1024, 37.39),
        (H100, "float32", 2048, 49.58),
        (H100, "tf32", 2048, 334.99),
        (H100, "tf32", 8192, 372.05),
        (H100, "bfloat16", 4096, 788.72),
        (A100_PCIE, "float32", 4096, 15.52),
        (A100_PCIE, "tf32", 1024, 61.02),
        (A100_PCIE, "tf32", 2048, 90.82),
    ],
)
def test_square_products_are_as_fast_as_others_measured(target, dtype, size, tflop_per_s) -> None:
    """zzc0721/torch-performance-test-data, issues 79 and 108.

    Only the shares of large products in float32 and TF32 are from there.
    """
    flops = 2 * size**3
    op_dtype = "bfloat16" if dtype == "bfloat16" else "float32"
    found = GpuModel(target, dtype).predict(product(op_dtype, (1, size, size, size)), 0)

    assert flops / found.seconds == pytest.approx(tflop_per_s * 1e12, rel=0.25)
    low, high = interval(found)
    assert low < flops / (tflop_per_s * 1e12) < high


def test_small_products_in_float32_are_no_slower_for_what_latency_costs_bfloat16() -> None:
    small = (1, 512, 1024, 1024)
    flops = 2 * 512 * 1024 * 1024
    found = GpuModel(A100, "float32").predict(product("float32", small), 0)

    assert found.seconds < flops / 19.5e12 / 0.7
    half = GpuModel(A100, "bfloat16").predict(product(shape=small), 0)
    assert half.seconds > flops / 312e12 / 0.5


def test_rows_off_sixteen_bytes_are_slow_on_tensor_cores_alone() -> None:
    for dtype, op_dtype in (("bfloat16", "bfloat16"), ("tf32", "float32")):
        model = GpuModel(H100, dtype)
        aligned = model.predict(product(op_dtype), 0)
        crooked = model.predict(product(op_dtype)._replace(is_aligned=False), 0)
        ratio = (crooked.seconds - KERNEL_S) / (aligned.seconds - KERNEL_S)
        assert ratio == pytest.approx(1 / MISALIGNED.value)
        assert crooked.spread > aligned.spread
        assert crooked.basis == "data sheet"

    model = GpuModel(H100, "float32")
    crooked = model.predict(product("float32")._replace(is_aligned=False), 0)
    assert crooked == model.predict(product("float32"), 0)


def test_operators_without_sizes_take_the_time_of_their_flops_or_bytes() -> None:
    norms = Cost("product_squares", "matmul", FLOPS, "bfloat16")
    found = GpuModel(H100, "bfloat16").predict(norms, 1000)
    sum_ = GpuModel(H200, "bfloat16").predict(Cost("add", "elementwise", 10, "float32"), 4_800_000)

    norm, other = (
        GpuModel(H100, "tf32").predict(Cost(op, "matmul", FLOPS, "float32"), 1000).seconds
        for op in ("dpprof.product_squares", "another")
    )

    low, high = interval(found)
    assert low < FLOPS / 989.4e12 / 0.6 < high
    assert norm - KERNEL_S == pytest.approx(3 * (other - KERNEL_S))
    assert found.seconds > FLOPS / 989.4e12
    assert sum_.seconds == pytest.approx(1e-6 / MEMORY.value + KERNEL_S)
    assert found.basis == sum_.basis == "data sheet"


@pytest.mark.parametrize(
    ("cost", "moved_bytes", "measured_s"),
    [
        # 8 and 16 samples of 1,024 tokens, 4 of 2,048 and 2 of 4,096; d and p
        (("dpprof.gram_squares", "matmul", 8 * 1024 * 1025 * 8192, "bfloat16"), 0, 162e-6),
        (("dpprof.gram_squares", "matmul", 16 * 1024 * 1025 * 10240, "bfloat16"), 0, 344e-6),
        (("dpprof.gram_squares", "matmul", 4 * 2048 * 2049 * 10240, "bfloat16"), 0, 329e-6),
        (("dpprof.gram_squares", "matmul", 2 * 4096 * 4097 * 8192, "bfloat16"), 0, 511e-6),
        (("dpprof.add_noise_", "random", 0, "float32"), 2**31, 761e-6),
        (("normal", "random", 0, "float32"), 2**28, 163e-6),
        (("dpprof.weigh", "elementwise", 0, "bfloat16"), 2**26, 22e-6),
    ],
)
def test_our_kernels_take_what_they_were_measured_to_take(cost, moved_bytes, measured_s) -> None:
    found = GpuModel(H100, "bfloat16").predict(Cost(*cost), moved_bytes)

    assert found.seconds == pytest.approx(measured_s, rel=0.2)


@pytest.mark.parametrize(
    ("op", "reads_again", "measured_s"),
    [
        ("native_layer_norm_backward", True, 316e-6),
        ("native_layer_norm_backward", False, 216e-6),
        ("_fused_rms_norm_backward", True, 306e-6),
        ("_fused_rms_norm_backward", False, 216e-6),
    ],
)
def test_gradients_of_norms_take_another_kernel(op, reads_again, measured_s) -> None:
    """16,384 tokens of 2,048 numbers, of which three tensors are moved."""
    cost = Cost(op, "reduction", 0, "float32", reads_again=reads_again)
    found = GpuModel(H100, "bfloat16").predict(cost, 3 * 16384 * 2048 * 4)

    assert found.seconds == pytest.approx(measured_s, rel=0.15)


def test_attention_in_float32_uses_no_tensor_cores() -> None:
    """24 blocks of 1b, 8 samples of 1,024 tokens, measured in a step in TF32."""
    sizes = AttentionShape(256, 1024, 1024, 64, True, False)
    cost = Cost("efficient", "attention", 4 * 256 * 1024**2 * 64, "float32", attention=sizes)
    of_dtypes = [GpuModel(H100, dtype).predict(cost, 0).seconds for dtype in ("float32", "tf32")]

    assert of_dtypes[0] == of_dtypes[1]
    assert 24 * of_dtypes[0] == pytest.approx(30.7e-3, rel=0.2)


def test_a_causal_mask_that_the_kernel_knows_halves_attention() -> None:
    def attend(*, is_causal: bool, is_backward: bool = False, tokens: int = 8192):
        sizes = AttentionShape(64, tokens, tokens, 128, is_causal, is_backward)
        flops = 4 * 64 * tokens**2 * 128
        cost = Cost("flash", "attention", flops, "bfloat16", attention=sizes)
        return GpuModel(A100, "bfloat16").predict(cost, 0).seconds - KERNEL_S, flops / 312e12

    full, bound = attend(is_causal=False)
    causal, _ = attend(is_causal=True)
    backward, _ = attend(is_causal=False, is_backward=True)
    short, short_bound = attend(is_causal=False, tokens=256)

    assert causal == pytest.approx(full / 2 / CAUSAL)
    assert 0.5 < bound / full < 0.73  # Dao 2023
    assert full < backward
    assert short_bound / short < 0.75 * bound / full


@pytest.mark.parametrize(
    ("target", "is_backward", "tokens", "tflop_per_s"),
    [
        (H100, False, 512, 252.49),
        (H100, False, 4096, 311.97),
        (H100, True, 512, 189.86),
        (H100, True, 2048, 263.71),
        (B200, False, 1024, 359.30),
        (B200, True, 2048, 301.61),
    ],
)
def test_attention_is_as_fast_as_others_measured(target, is_backward, tokens, tflop_per_s) -> None:
    """Dao-AILab/flash-attention: pull request 2688, and issue 1589; 32 heads of width 64."""
    heads = 32 * 16384 // tokens
    flops = int(4 * heads * tokens**2 * 64 * (2.5 if is_backward else 1))
    sizes = AttentionShape(heads, tokens, tokens, 64, False, is_backward)
    cost = Cost("flash", "attention", flops, "bfloat16", attention=sizes)
    found = GpuModel(target, "bfloat16").predict(cost, 0)

    assert flops / found.seconds == pytest.approx(tflop_per_s * 1e12, rel=0.15)


WIDE = (1024, 1024, 1, 8)


@functools.cache
def predict(model: str | tuple[int, ...] = WIDE, **fields):
    if model != "tiny":
        sizes = ("vocab_size", "d_model", "layers", "heads")
        model = dict(zip(sizes, model, strict=True))
    usual = {"device": "cuda", "target": "h100", "dtype": "bfloat16", "method": "standard"}
    experiment = make_experiment(**usual | {"model": model} | fields)
    return estimate(experiment, lambda _: None).time.predicted_step_s


def test_a_tiny_step_waits_for_the_host_and_a_large_one_rests_on_the_devices_table() -> None:
    tiny = predict(model="tiny", batch_size=1, seq_len=16)
    large = predict(batch_size=32, seq_len=1024)

    assert tiny.waiting_share > 0.4
    assert large.waiting_share < 0.1
    assert tiny.low < tiny.median < tiny.high
    assert tiny.median < large.low < large.median
    assert sum(large.rests_on.values()) == pytest.approx(1)
    assert large.rests_on["measured at this shape"] > 0.1
    on_l4 = predict(batch_size=32, seq_len=1024, target="l4")
    assert set(on_l4.rests_on) == {"extrapolated", "data sheet"}
    assert on_l4.median > 3 * large.median


def test_noise_and_optimizer_are_what_a_step_without_them_lacks() -> None:
    one, four = (predict(batch_size=size, seq_len=1024) for size in (8, 32))
    sgd = predict(batch_size=8, seq_len=1024, optimizer="sgd")
    private = predict(batch_size=8, seq_len=1024, method="flash-bk")

    adamw_s, noisy_s = (step.median - step.without_update for step in (one, private))
    # AdamW must read parameter, gradient and two moments, and write all but the gradient.
    parameters = 2 * 1024 * 1024 + 12 * 1024**2 + 1024 * 1024
    least_s = 7 * 4 * parameters / 3350e9
    assert least_s < adamw_s < 5 * least_s
    assert four.median - four.without_update == pytest.approx(adamw_s, rel=0.05)
    assert sgd.median - sgd.without_update < adamw_s < noisy_s


def test_every_device_with_a_table_is_a_target_of_its_architecture() -> None:
    for target, name in gpu_model.MEASURED.items():
        assert gpu_model._OF_ARCHITECTURE[target.compute_capability] in (name, "h100")
    assert L4 not in gpu_model.MEASURED


def test_a_convolution_takes_longer_than_its_products_and_is_less_sure() -> None:
    shapes = SHAPE, (1, 2048, 8192, 4096)
    of_products = [GpuModel(H100, "bfloat16").predict(product(shape=one), 0) for one in shapes]
    cost = Cost("convolution_backward", "matmul", 2 * FLOPS, "bfloat16", convolution=tuple(shapes))
    found = GpuModel(H100, "bfloat16").predict(cost, 0)

    alone = sum(one.seconds - KERNEL_S for one in of_products)
    assert found.seconds == pytest.approx(alone / CONVOLUTIONS.value + KERNEL_S)
    assert found.spread >= CONVOLUTIONS.spread > max(one.spread for one in of_products)
    assert found.basis == "data sheet"
