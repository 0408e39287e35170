"""What a step asks of Python: small sums together, and proofs only where rows may be in orders."""

import pytest
import torch
from torch import nn

from dpprof.private import BookKeeping, NoisyOptimizer
from dpprof.private.contributions.sums import SMALL, group_small
from dpprof.private.graph import layout
from dpprof.private.norms import placement, triton_ops


@pytest.fixture
def on_cuda():
    """Treat tensors as if they were on CUDA, but for Triton's kernels."""
    with placement.as_if_on_cuda():
        yield


def test_small_sums_are_grouped_by_dtype_and_size(on_cuda) -> None:
    sizes = [3, SMALL + 1, SMALL, 5, SMALL, SMALL, SMALL]
    sums = [torch.empty(size) for size in sizes]
    sums[3] = sums[3].double()

    assert group_small(sums) == [[0, 2, 4, 5, 6], [1], [3]]
    assert group_small([]) == []


def take_step(sizes: list[int], generator: torch.Generator | None) -> list[torch.Tensor]:
    """Step once with noise alone; return the gradients."""
    layer = nn.Linear(sizes[0], sizes[1])
    clipping = BookKeeping(layer, 1.0)
    optimizer = NoisyOptimizer(
        torch.optim.SGD(layer.parameters(), 0.0),
        clipping,
        noise_multiplier=2.0,
        expected_batch_size=4,
        generator=generator,
    )
    clipping.backward(torch.zeros(0))
    optimizer.step()
    return [parameter.grad for parameter in layer.parameters()]


def test_noise_of_small_sums_has_the_deviation_and_is_independent(on_cuda, monkeypatch) -> None:
    monkeypatch.setattr(triton_ops, "is_fused", lambda _: False)
    weight, bias = take_step([1000, 4], None)

    assert float(weight.std()) == pytest.approx(0.5, rel=0.06)
    assert len({float(value) for value in (*weight.flatten(), *bias)}) > 3_990  # few by chance
    assert weight.untyped_storage().nbytes() == 16_000  # each in memory of its own


def test_a_given_generator_draws_for_each_parameter_in_turn() -> None:
    weight, bias = take_step([3, 2], torch.Generator().manual_seed(1))

    again = torch.Generator().manual_seed(1)
    assert weight.equal(torch.normal(0.0, 0.5, (2, 3), generator=again))
    assert bias.equal(torch.normal(0.0, 0.5, (2,), generator=again))


class Halving(nn.Module):
    """Cuts an axis and joins it again, as rotary positions do with features."""

    def __init__(self, axis: int) -> None:
        super().__init__()
        self.axis, self.layer = axis, nn.Linear(4, 4)

    def forward(self, x):
        first, second = self.layer(x).chunk(2, self.axis)
        return torch.cat([first, -second], self.axis)


@pytest.mark.parametrize(("axis", "proves_again"), [(0, True), (1, False), (2, False)])
def test_rows_are_proven_again_only_where_samples_change_their_order(
    axis, proves_again, monkeypatch
) -> None:
    model = Halving(axis)
    clipping = BookKeeping(model, 1.0, first_batch="trusted")
    proofs = []
    proof = layout.Proof
    monkeypatch.setattr(layout, "Proof", lambda *a, **kw: proofs.append(1) or proof(*a, **kw))

    counts = []
    for _ in range(3):
        clipping.backward(model(torch.randn(4, 2, 4)).square().sum((1, 2)))
        counts.append(len(proofs))

    assert counts == ([1, 2, 3] if proves_again else [1, 1, 1])


def test_a_call_may_change_attributes_to_equal_ones() -> None:
    layer = nn.Linear(2, 1)
    layer.scale = 1000.5
    clipping = BookKeeping(layer, 1.0)
    losses = layer(torch.randn(3, 2)).sum(1)
    layer.scale = float("1000.5")

    clipping.backward(losses)
    assert layer.weight.grad is not None
