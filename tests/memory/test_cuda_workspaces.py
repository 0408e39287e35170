"""Buffers of CUDA kernels: what snapshots of real GPUs show, and cases worked out by hand."""

import pytest
import torch

from dpprof.predict.memory.cuda_workspaces import Processors, cuda_workspaces, reduction_buffers

H100_PCIE = Processors.of(114, "9.0")
H100 = Processors.of(132, "9.0")


def _on_meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("shape", [(4096, 5120), (32, 128, 5120)])
def test_a_bias_gradient_of_gpt2_large_takes_115_mib_on_an_h100(shape) -> None:
    """As a snapshot of minGPT shows (github.com/ailzhang/EfficientPyTorch): 32 x 128 tokens."""
    dims = range(len(shape) - 1)
    assert reduction_buffers(_on_meta(*shape), dims, 4, H100_PCIE)[0] == 115 * 2**20


def test_a_maximum_over_rows_takes_528_mib_on_an_h100() -> None:
    """16 bytes for value and index; 33 thread blocks for each of 64 groups of columns."""
    assert reduction_buffers(_on_meta(8192, 8192), [0], 16, H100) == (528 * 2**20, 4 * 64)


@pytest.mark.parametrize(
    ("shape", "dims", "expected"),
    [
        ((512, 1024), [1], (0, 0)),  # a warp for each row: nothing is shared
        ((100, 5120), [0], (0, 0)),  # too few rows
        ((4096, 2**20), [0], (0, 0)),  # so many columns that the device is full without
        ((1,), [0], (0, 0)),
        ((0, 7), [0], (0, 0)),
        # 512 threads would have 2,048 values each: 128 blocks share them, 16 for each thread.
        ((2**20,), [], (4 * 128, 4)),
    ],
)
def test_cases_by_hand(shape: tuple[int, ...], dims: list[int], expected: tuple[int, int]) -> None:
    assert reduction_buffers(_on_meta(*shape), dims, 4, H100) == expected


def test_a_view_with_gaps_and_a_transposed_one_count_by_strides() -> None:
    rows = _on_meta(4096, 5120)
    assert reduction_buffers(rows.t(), [1], 4, H100) == reduction_buffers(rows, [0], 4, H100)
    # Strides that no vector divides: a thread has one column. A block of 32 x 16 threads has 32
    # columns, of 160 such groups; 4 blocks on each of 132 multiprocessors make 4 shares of each.
    odd = _on_meta(4096, 5121)[:, :5120]
    assert reduction_buffers(odd, [0], 4, H100) == (4 * 5120 * 4 * 32, 4 * 160)


def test_more_than_two_gibibytes_are_reduced_in_parts() -> None:
    """Offsets must fit 32 bits, so halves are reduced one after the other."""
    whole = _on_meta(2**18, 5120)
    half = _on_meta(2**16, 5120)
    assert reduction_buffers(whole, [0], 4, H100) == reduction_buffers(half, [0], 4, H100)


def test_threads_of_a_multiprocessor_follow_the_compute_capability() -> None:
    assert Processors.of(58, "8.9").threads == 1536
    assert Processors.of(108, "8.0").threads == 2048


aten = torch.ops.aten
ALL, ROWS = (), (0,)


@pytest.mark.parametrize(
    ("packet", "args", "dims", "size"),
    [
        (aten.sum, (), ALL, 4),
        (aten.sum, ([0],), ROWS, 4),
        (aten.sum, ([],), ALL, 4),
        (aten.prod, (0,), ROWS, 4),
        (aten.linalg_vector_norm, (2,), ALL, 4),  # 2 is its order, and no axis
        (aten.linalg_vector_norm, (2, [0]), ROWS, 4),
        (aten.amax, ([0],), ROWS, 4),
        (aten.argmax, (0,), ROWS, 16),
        (aten.max, (), ALL, 4),
        (aten.max, (0,), ROWS, 16),
        (aten.any, (0,), ROWS, 1),
        (aten.var, (), ALL, 16),
        (aten.var, (True,), ALL, 16),  # a flag is no axis
    ],
)
def test_axes_are_distinguished_from_other_arguments(packet, args, dims, size) -> None:
    x = _on_meta(8192, 2048)
    found = cuda_workspaces(H100)[packet](x, *args)
    # A thread loads fewer elements at once where it computes a variance.
    assert found == reduction_buffers(x, dims, size, H100, 2 if packet is aten.var else 4)
    assert sum(found) > 0
    assert packet not in cuda_workspaces(None)


def test_an_elementwise_maximum_has_no_buffer() -> None:
    x = _on_meta(8192, 2048)
    assert cuda_workspaces(H100)[aten.max](x, x) == ()


def test_many_short_rows_leave_partial_gradients_of_a_norm() -> None:
    """32 rows a block, and at most 32,768 blocks; once for the weight and once for the bias."""
    take = cuda_workspaces(H100)[aten.native_layer_norm_backward]

    def partial_gradients(rows: int, width: int, mask: list[bool]) -> list[int]:
        x = _on_meta(rows, width)
        return list(take(x, x, [width], x, x, None, None, mask))

    assert partial_gradients(2**17, 64, [True, True, True]) == [2**12 * 64 * 4] * 2
    assert partial_gradients(2**17, 64, [True, True, False]) == [2**12 * 64 * 4]
    assert partial_gradients(2**16, 64, [True, True, True]) == []  # too few rows
    assert partial_gradients(2**17, 4096, [True, True, True]) == []  # wide enough as it is


LAST = torch.channels_last
CONTIGUOUS = torch.contiguous_format


@pytest.mark.parametrize(
    ("of_x", "of_weight", "of_gradient", "forward", "backward"),
    [
        (CONTIGUOUS, CONTIGUOUS, CONTIGUOUS, [], []),
        (LAST, LAST, LAST, [], []),
        (LAST, LAST, CONTIGUOUS, [], ["gradient"]),
        # One of them with the channels last is enough for all (ConvUtils.h).
        (CONTIGUOUS, LAST, LAST, ["x"], ["x"]),
        (LAST, CONTIGUOUS, CONTIGUOUS, ["weight"], ["gradient", "weight"]),
    ],
)
def test_a_convolution_copies_what_is_laid_out_otherwise(
    of_x, of_weight, of_gradient, forward, backward
) -> None:
    x = _on_meta(2, 3, 8, 8).to(memory_format=of_x)
    weight = _on_meta(5, 3, 3, 3).to(memory_format=of_weight)
    gradient = _on_meta(2, 5, 6, 6).to(memory_format=of_gradient)
    sizes = {"x": 4 * 2 * 3 * 8 * 8, "weight": 4 * 5 * 3 * 3 * 3, "gradient": 4 * 2 * 5 * 6 * 6}
    take = cuda_workspaces(None)

    assert list(take[aten.convolution](x, weight)) == [sizes[name] for name in forward]
    found = take[aten.convolution_backward](gradient, x, weight)
    assert list(found) == [sizes[name] for name in backward]


def test_a_convolution_in_float64_wants_its_channels_second() -> None:
    x = _on_meta(2, 3, 8, 8, dtype=torch.float64).to(memory_format=LAST)
    weight = _on_meta(5, 3, 3, 3, dtype=torch.float64)
    assert cuda_workspaces(None)[aten.convolution](x, weight) == [8 * 2 * 3 * 8 * 8]


def test_a_group_norm_copies_its_input_and_gradient_if_the_channels_are_last() -> None:
    x, last = _on_meta(2, 6, 4, 4), _on_meta(2, 6, 4, 4).to(memory_format=LAST)
    take = cuda_workspaces(None)
    size = 4 * 2 * 6 * 4 * 4

    assert take[aten.native_group_norm](x) == []
    assert take[aten.native_group_norm](last) == [size]
    assert take[aten.native_group_norm_backward](x, last) == [size]
    assert take[aten.native_group_norm_backward](last, last) == [size, size]
