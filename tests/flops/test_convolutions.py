"""FLOPs of convolutions and their gradients, and the model FLOPs that follow."""

import itertools

import pytest
import torch
from factory import make_experiment
from torch import nn

from dpprof.predict.estimate import estimate
from dpprof.predict.flops.counter import FlopCounter
from dpprof.predict.flops.op_costs import learn_rule
from dpprof.predict.plain_step import count_model_flops
from dpprof.subjects.models.build import build_model

aten = torch.ops.aten


def count_multiplications(x, weight, stride, padding, groups) -> int:
    """Count by definition: each output pixel takes each pixel below the kernel, padding too."""
    count = 0
    height = (x.shape[2] + 2 * padding - weight.shape[2]) // stride + 1
    width = (x.shape[3] + 2 * padding - weight.shape[3]) // stride + 1
    per_group = weight.shape[0] // groups
    for _ in itertools.product(range(x.shape[0]), range(height), range(width)):
        for _, _ in itertools.product(range(groups), range(per_group)):
            count += weight.shape[1] * weight.shape[2] * weight.shape[3]
    return count


@pytest.mark.parametrize(
    "sizes", [(3, 4, 3, 1, 1, 1), (4, 6, 3, 2, 0, 2), (4, 4, 5, 1, 2, 4), (2, 3, 1, 1, 0, 1)]
)
def test_flops_are_two_for_each_multiplication(sizes) -> None:
    channels, outputs, kernel, stride, padding, groups = sizes
    x = torch.randn(2, channels, 7, 6, requires_grad=True)
    weight = torch.randn(outputs, channels // groups, kernel, kernel, requires_grad=True)
    expected = 2 * count_multiplications(x, weight, stride, padding, groups)
    with FlopCounter() as forward:
        y = nn.functional.conv2d(x, weight, None, stride, padding, 1, groups)
    with FlopCounter() as both:
        y.sum().backward(retain_graph=True)
    with FlopCounter() as of_weight:
        torch.autograd.grad(y.sum(), weight)

    assert (forward.flops, both.flops) == (expected, 2 * expected)
    assert forward.unpriced is both.unpriced is None
    assert of_weight.flops in (expected, 2 * expected)  # autograd may compute what nobody needs


def test_a_transposed_convolution_costs_what_its_gradient_does() -> None:
    x, weight = torch.randn(2, 3, 5, 5), torch.randn(3, 4, 3, 3)
    with FlopCounter() as counter:
        nn.functional.conv_transpose2d(x, weight, stride=2)

    assert counter.flops == 2 * 2 * 5 * 5 * 3 * 4 * 3 * 3


def test_a_convolution_amounts_to_matrix_products_of_as_many_flops() -> None:
    x, weight = torch.randn(2, 4, 6, 6), torch.randn(6, 2, 3, 3)
    settings = [1, 1], [1, 1], [1, 1], False, [0, 0], 2
    out = aten.convolution(x, weight, None, *settings)
    cost, *_ = learn_rule(aten.convolution.default).price((x, weight, None, *settings), {}, out)
    mask = [True, True, False]
    args = (torch.ones_like(out), x, weight, [0], *settings, mask)
    found = aten.convolution_backward(*args)
    backward, *_ = learn_rule(aten.convolution_backward.default).price(args, {}, found)

    assert cost.convolution == ((2, 72, 3, 18),)
    assert backward.convolution == ((2, 72, 18, 3), (2, 3, 18, 72))
    assert backward.flops == 2 * cost.flops == 2 * 2 * 2 * 72 * 3 * 18


def test_resnet_50_needs_as_many_multiplications_as_published() -> None:
    """torchvision's table of models says 4.09 GFLOPs, by which it means multiplications."""
    experiment = make_experiment(model="resnet50-gn", seq_len=None, batch_size=1)
    flops = count_model_flops(experiment, build_model(experiment))
    first = 2 * 64 * 3 * 7 * 7 * 112 * 112  # of which no gradient of the input is needed

    assert (flops + first) / 6 == pytest.approx(4.09e9, rel=1e-3)


def test_counted_model_flops_are_those_of_the_formula() -> None:
    """6 N + 12 L d T a token, of a transformer with a label for each token."""
    T, V, D, wide = 24, 211, 32, 80
    experiment = make_experiment(
        model={"hf": "tiny-bert", "task": "masked-lm"}, seq_len=T, batch_size=3
    )
    matrices = 2 * (4 * D * D + 2 * D * wide) + D * D + V * D
    expected = 3 * T * (6 * matrices + 12 * 2 * D * T)

    assert count_model_flops(experiment, build_model(experiment)) == expected


@pytest.mark.slow
@pytest.mark.parametrize(("method", "multiple"), [("opacus-hooks", 4 / 3), ("opacus-ghost", 2)])
def test_private_methods_execute_as_many_times_the_flops_as_known(method, multiple) -> None:
    """Ordinary gradients and per-sample ones, or two backward passes of which one has both."""
    experiment = make_experiment(
        model="wrn-16-4", image_size=16, seq_len=None, method=method, noise_multiplier=0.1
    )
    compute = estimate(experiment, lambda _: None).compute

    assert compute.dp_flop_multiplier == pytest.approx(multiple, rel=1e-2)
