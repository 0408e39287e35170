"""What operators allocate and free themselves on a CPU, compared with the allocator's events.

Shape legend: T steps, B samples, d width of an input, h width of a state.
"""

from functools import partial

import pytest
import torch
from allocator_events import find_peak
from torch._subclasses.fake_tensor import FakeTensorMode

from dpprof.predict.memory.cpu_workspaces import CPU_WORKSPACES
from dpprof.predict.memory.fake_operators import FakeOperators

aten = torch.ops.aten
SCALARS = 16
"""A Python number that an operator wraps in a tensor, in two dtypes."""

LSTMS = [
    *((12, 16, 8, 24), (40, 32, 8, 64), (12, 16, 40, 100), (3, 127, 17, 33), (3, 128, 17, 33)),
    *((9, 4, 64, 64), (2, 5, 256, 7), (1, 16, 16, 16), (1, 1, 1, 1), (4, 2, 1, 5), (6, 2, 5, 1)),
]
"""Steps, samples, width of the input and of the state."""


def make_lstm(steps, batch, inputs, width, dtype=torch.float32):
    """Arguments of a forward pass, and of backward passes of what it returned."""
    x, hx, cx = (
        torch.randn(*size, dtype=dtype)
        for size in ((steps, batch, inputs), (1, batch, width), (1, batch, width))
    )
    matrices = [torch.randn(4 * width, size, dtype=dtype) for size in (inputs, width)]
    biases = [torch.randn(4 * width, dtype=dtype)] * 2
    given = x, *matrices, *biases, hx, cx
    forward = *given, False, [], 2, width, 1, True, False, False, True
    y, hy, cy, kept = aten.mkldnn_rnn_layer(*forward)
    others = False, 2, width, 1, True, True, False, [], False, kept
    strided = torch.randn(batch, steps, width, dtype=dtype).transpose(0, 1)
    gradients = (torch.ones_like(y), None, None), (None, torch.ones_like(hy), None)
    gradients += ((strided, None, torch.ones_like(cy)),)
    return forward, [(*given, y, hy, cy, *one, *others) for one in gradients]


def as_fake(mode, values):
    return [mode.from_tensor(one) if isinstance(one, torch.Tensor) else one for one in values]


def layout(tensor):
    return tensor.shape, tensor.stride(), tensor.dtype, tensor.untyped_storage().nbytes()


@pytest.mark.parametrize("sizes", LSTMS, ids=str)
def test_an_lstm_returns_and_allocates_what_is_counted(sizes) -> None:
    forward, backward = make_lstm(*sizes)
    calls = [(aten.mkldnn_rnn_layer, forward)]
    calls += [(aten.mkldnn_rnn_layer_backward, args) for args in backward]
    for packet, args in calls:
        assert sum(CPU_WORKSPACES[packet](*args)) == find_peak(partial(packet, *args))
        real = packet(*args)
        with FakeTensorMode() as mode:
            fake = FakeOperators(mode)(packet.default, as_fake(mode, args), {})
        assert [*map(layout, fake)] == [*map(layout, real)]
        assert len({one.untyped_storage()._cdata for one in fake}) == len(fake)


@pytest.mark.skipif(
    not torch.ops.mkldnn._is_mkldnn_bf16_supported(), reason="PyTorch has no such LSTM here"
)
@pytest.mark.parametrize("sizes", LSTMS[:4], ids=str)
def test_an_lstm_in_16_bits_returns_what_is_counted_and_allocates_no_less(sizes) -> None:
    forward, backward = make_lstm(*sizes, dtype=torch.bfloat16)
    kept = aten.mkldnn_rnn_layer(*forward)[3]
    with FakeTensorMode() as mode:
        args = as_fake(mode, forward)
        fake = FakeOperators(mode)(aten.mkldnn_rnn_layer.default, args, {})
    assert fake[3].nbytes == kept.nbytes
    assert sum(CPU_WORKSPACES[aten.mkldnn_rnn_layer](*forward)) <= find_peak(
        partial(aten.mkldnn_rnn_layer, *forward)
    )
    for args in backward:
        run = partial(aten.mkldnn_rnn_layer_backward, *args)
        assert sum(CPU_WORKSPACES[aten.mkldnn_rnn_layer_backward](*args)) <= find_peak(run)


def test_an_lstm_keeps_nothing_without_gradients() -> None:
    forward, _ = make_lstm(*LSTMS[0])
    with torch.no_grad():
        peak = find_peak(partial(aten.mkldnn_rnn_layer, *forward))
        with FakeTensorMode() as mode:
            args = as_fake(mode, forward)
            fake = FakeOperators(mode)(aten.mkldnn_rnn_layer.default, args, {})
        counted = sum(CPU_WORKSPACES[aten.mkldnn_rnn_layer](*forward))
    assert fake[3].nbytes == 0
    assert peak - 2**14 <= counted <= peak


LAYOUTS = ((4, 6, 8), (0, 1, 2)), ((6, 8, 4), (2, 0, 1)), ((3, 1, 4, 6), (0, 3, 1, 2))
"""The shape in memory, and the order in which the axes are seen."""


def transforms():
    for shape, order in LAYOUTS:
        x = torch.randn(*shape).permute(*order)
        whole = torch.randn(*shape, dtype=torch.cfloat).permute(*order)
        for axes in ([-1], [-2, -1], [0, 1], [1]):
            given = [axis % x.dim() for axis in axes]
            yield aten._fft_r2c, x, given, 0, True
            yield aten._fft_r2c, x, given, 0, False
            yield aten._fft_c2c, whole, given, 0, True
            yield aten._fft_c2r, whole, given, 2, 2 * whole.shape[given[-1]] - 1


@pytest.mark.parametrize("call", [*transforms()], ids=lambda call: str(call[0]))
def test_a_fourier_transform_allocates_what_is_counted(call) -> None:
    operator, *args = call
    counted = sum(CPU_WORKSPACES[operator](*args))
    assert counted == max(0, find_peak(partial(operator, *args)))


def elementwise():
    x, ids = torch.randn(20, 10), torch.arange(200).view(20, 10)
    double, short, mask, waves = x.double(), x.bfloat16(), x > 0, x.to(torch.cfloat)
    for other in (double, short, mask, ids, double[0], x, 2.0):
        for operator in (aten.add, aten.mul, aten.div, aten.maximum, aten.lt, aten.pow):
            if isinstance(other, torch.Tensor) or operator in (aten.add, aten.mul):
                yield operator, (x, other), {}
    yield aten.mul, (x, waves), {}
    yield aten.abs, (waves,), {}
    yield aten.angle, (waves,), {}
    yield aten.where, (mask, x, double), {}
    yield aten.sum, (mask, [1]), {}
    yield aten.sum, (short, [1]), {"dtype": torch.float32}
    yield aten.sum, (x, [1]), {}
    yield aten.cumsum, (mask, 1), {}
    yield aten.linalg_vector_norm, (short, 2, [1]), {"dtype": torch.float32}
    for strided in (x, torch.randn(10, 20).t()):
        yield aten._softmax, (strided, -1, False), {}
        yield aten._safe_softmax, (strided, -1), {}
        yield aten._softmax_backward_data, (strided, x, -1, torch.float32), {}
        yield aten._log_softmax_backward_data, (x, strided, -1, torch.float32), {}


def products():
    for dtype in (torch.float32, torch.float64, torch.cfloat):
        x, y = torch.randn(40, 60, dtype=dtype), torch.randn(60, 30, dtype=dtype)
        every_other = torch.randn(40, 120, dtype=dtype)[:, ::2]
        row = torch.randn(60, 1, dtype=dtype).expand(60, 30)
        for one, other in ((x, y), (every_other, y), (x, row), (y.t(), x.t())):
            yield aten.mm, (one, other), {}
            yield aten.addmm, (torch.randn(other.shape[1], dtype=dtype), one, other), {}
        batch = torch.randn(8, 12, 14, dtype=dtype), torch.randn(8, 14, 10, dtype=dtype)
        last = [one.permute(1, 2, 0).contiguous().permute(2, 0, 1) for one in batch]
        for one, other in (batch, last, (batch[0].conj(), last[1]), (batch[0], batch[1].conj())):
            yield aten.bmm, (one, other), {}
            yield aten.bmm, (one[:, :3, :4], other[:, :4, :5]), {}


@pytest.mark.parametrize("call", [*elementwise(), *products()], ids=lambda call: str(call[0]))
def test_an_operator_copies_the_operands_that_are_counted(one_thread, call) -> None:
    operator, args, options = call
    peak = find_peak(partial(operator, *args, **options))
    counted = sum(CPU_WORKSPACES[operator](*args, **options))
    assert abs(peak - counted) <= SCALARS


@pytest.mark.parametrize("other", [torch.float64, torch.bfloat16, torch.bool])
def test_an_operator_in_place_casts_there_and_back(other) -> None:
    x, y = torch.randn(20, 10), (torch.randn(20, 10) > 0).to(other)
    peak = find_peak(lambda: [aten.mul_(x, y)][1:])
    assert sum(CPU_WORKSPACES[aten.mul_](x, y)) == peak


@pytest.mark.parametrize("shape", [(16, 8), (16, 8, 14), (16, 8, 5, 5), (2, 8, 3, 3, 3)])
@pytest.mark.parametrize("needs_input", [True, False])
def test_batch_norm_makes_a_second_gradient_of_its_input(shape, needs_input) -> None:
    x, gradient, of_channels = torch.randn(shape), torch.randn(shape), torch.ones(8)
    strided = torch.randn(shape[::-1]).permute(*reversed(range(len(shape))))
    for given in (gradient, strided):
        args = given, x, *[of_channels] * 5, True, 1e-5, [needs_input, True, True]
        peak = find_peak(partial(aten.native_batch_norm_backward, *args))
        counted = sum(CPU_WORKSPACES[aten.native_batch_norm_backward](*args))
        assert 0 <= peak - counted <= 4 * 8 * 4


def test_a_periodic_window_lacks_the_last_element_of_its_storage() -> None:
    for packet in (aten.hann_window, aten.hamming_window, aten.kaiser_window):
        for args in ((16,), (16, True), (16, False), (1, True)):
            operator = packet.default if len(args) == 1 else packet.periodic
            real = operator(*args)
            with FakeTensorMode() as mode:
                fake = FakeOperators(mode)(operator, args, {})
            assert layout(fake) == layout(real)


CONVOLUTIONS = [
    # images, channels, outputs, kernel, stride, height, groups
    (8, 64, 64, 3, 1, 32, 1),
    (8, 20, 24, 3, 1, 32, 1),
    (8, 256, 256, 3, 1, 8, 1),
    (8, 64, 128, 1, 1, 16, 1),
    (2, 128, 128, 3, 1, 16, 8),
]


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() != "AVX512", reason="layouts differ by processor"
)
@pytest.mark.parametrize("sizes", CONVOLUTIONS)
def test_a_convolution_allocates_what_is_counted(one_thread, sizes) -> None:
    images, channels, outputs, kernel, stride, side, groups = sizes
    x = torch.randn(images, channels, side, side)
    weight = torch.randn(outputs, channels // groups, kernel, kernel)
    settings = [stride] * 2, [kernel // 2] * 2, [1, 1], False, [0, 0], groups
    gradient = torch.randn_like(aten.convolution(x, weight, None, *settings))
    masks = [True, True, False], [False, True, False], [True, False, False]
    calls = [(aten.convolution, (x, weight, None, *settings))]
    calls += [
        (aten.convolution_backward, (gradient, x, weight, [0], *settings, mask)) for mask in masks
    ]
    peaks = [find_peak(partial(operator, *args)) for operator, args in calls]
    assert [sum(CPU_WORKSPACES[operator](*args)) for operator, args in calls] == peaks
