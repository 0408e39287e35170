"""The row of ``padding_idx`` has no gradient, with Opacus's rules as with PyTorch's."""

import pytest
import torch
from opacus.grad_sample import GradSampleModule, GradSampleModuleFastGradientClipping
from torch import nn

from dpprof.methods.opacus.samplers import leave_padding_out

PADDING = 3
IDS_BT = torch.tensor([[0, 3, 1], [3, 3, 3]])
WRAPPERS = [GradSampleModule, GradSampleModuleFastGradientClipping]


def run(wrapper, *, ours: bool) -> nn.Parameter:
    """The weight of a table after a backward pass that gives each looked-up element 1."""
    module = wrapper(nn.Embedding(5, 2, padding_idx=PADDING), loss_reduction="mean")
    if ours:
        leave_padding_out(module)
    (module(IDS_BT).sum() / len(IDS_BT)).backward()
    return module._module.weight


def test_per_sample_gradients_have_zeros_in_the_row_of_padding() -> None:
    expected = torch.zeros(2, 5, 2)
    expected[0, [0, 1]] = 1

    torch.testing.assert_close(run(GradSampleModule, ours=True).grad_sample, expected)


def test_norms_leave_padding_out() -> None:
    norms_B = run(GradSampleModuleFastGradientClipping, ours=True)._norm_sample

    torch.testing.assert_close(norms_B, torch.tensor([4.0**0.5, 0.0]))


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_opacus_own_rules_still_give_padding_a_gradient(wrapper) -> None:
    """Where this fails, Opacus was mended, and ``leave_padding_out`` can go."""
    weight = run(wrapper, ours=False)
    norms_B = (
        weight.grad_sample.flatten(1).norm(dim=1)
        if wrapper is GradSampleModule
        else weight._norm_sample
    )

    assert norms_B[1] > 0


def test_another_model_keeps_opacus_own_rules() -> None:
    run(GradSampleModule, ours=True)

    assert run(GradSampleModule, ours=False).grad_sample[1, PADDING].abs().sum() > 0
