"""Executed FLOPs of users' loops against formulas and PyTorch's own counter."""

import pytest
import torch
from factory import make_experiment
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from dpprof.flops import counter as counter_module
from dpprof.flops.counter import FlopCounter
from dpprof.methods.training_step import Batch
from dpprof.spec import registry

B, T, D, LAYERS = 2, 64, 32, 6
UNIT = LAYERS * B * T * D * D
GRAM = LAYERS * 2 * B * T * T * 2 * D


def linears() -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(D, D, bias=False) for _ in range(LAYERS)))


def counted(run) -> int:
    counter = FlopCounter()
    with counter:
        run()
    assert counter.unpriced is None
    return counter.flops


@pytest.mark.parametrize("input_requires_grad", [True, False])
def test_a_linear_stack_costs_what_theory_and_pytorch_say(input_requires_grad) -> None:
    stack = linears()
    x_BTD = torch.randn(B, T, D, requires_grad=input_requires_grad)
    spared = 0 if input_requires_grad else 2 * B * T * D * D

    def step() -> None:
        stack(x_BTD).sum().backward()

    with FlopCounterMode(display=False) as pytorch:
        step()

    assert counted(step) == pytorch.get_total_flops() == 6 * UNIT - spared


class Lookup(nn.Module):
    """Linear layers on a looked-up input, which requires a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(D, D)
        self.layers = linears()

    def forward(self, tokens: Tensor) -> Tensor:
        return self.layers(self.table(tokens))


# docs/methods.md has the coefficients. Two Gram matrices are multiplied element by element and
# summed, which is a product too, and Opacus sums the table's samples as it does a layer's.
SUMMED = 2 * B * D * D
INNER = LAYERS * 2 * B * T * T
PRIVATE = {
    "opacus-hooks": 8 * UNIT + (LAYERS + 1) * SUMMED,
    "opacus-functorch": 10 * UNIT + (LAYERS + 1) * SUMMED,
    "opacus-ghost": 10 * UNIT + GRAM + INNER,
    "flash-bk": 6 * UNIT + LAYERS * SUMMED,
}


@pytest.mark.parametrize("method", PRIVATE)
def test_private_steps_cost_what_theory_says(method) -> None:
    experiment = make_experiment(method=method, batch_size=B, seq_len=T, noise_multiplier=0.1)
    step = registry.load("methods", method)(Lookup(), experiment)
    step.attach_optimizer(torch.optim.SGD(step.module.parameters(), lr=0.1))
    batch = Batch(*torch.randint(D, (2, B, T)))

    assert counted(lambda: step.run(batch, lambda _: None)) == PRIVATE[method]


def test_composite_operators_are_counted_in_inference_mode_too() -> None:
    layer, x = nn.Linear(D, D), torch.randn(B, T, D)
    with torch.inference_mode():
        assert counted(lambda: layer(x)) == 2 * B * T * D * D


def test_a_product_without_a_formula_is_told() -> None:
    of_bytes = torch.ones(16, 32, dtype=torch.int8)
    a, scales = torch.ones(4, 32).bfloat16(), torch.ones(16).bfloat16()
    counter = FlopCounter()
    with counter:
        torch.ops.aten._weight_int8pack_mm(a, of_bytes, scales)

    assert counter.unpriced == "_weight_int8pack_mm: no formula is known"


def test_attention_is_counted_in_inference_mode_too() -> None:
    q = torch.ones(2, 3, 8, 16)
    with torch.inference_mode():
        attend = nn.functional.scaled_dot_product_attention
        assert counted(lambda: attend(q, q, q)) == 2 * 2 * 2 * 3 * 8 * 8 * 16


def test_compiled_code_stays_compiled() -> None:
    runs = []

    def backend(graph, _):
        return lambda *args: runs.append("compiled") or graph(*args)

    stack = torch.compile(linears(), backend=backend)
    x = torch.randn(B, T, D)

    assert counted(lambda: stack(x)) == 2 * UNIT
    stack(x)
    assert runs == ["compiled"] * 2
    torch._dynamo.reset()


def test_an_operator_without_a_price_is_told_and_ends_nothing(monkeypatch) -> None:
    class Odd:
        name, is_counted = "odd", True

        def count_products(self, *_):
            raise AssertionError("four axes")

    monkeypatch.setattr(counter_module, "learn_rule", lambda _: Odd())
    counter = FlopCounter()
    with counter:
        total = torch.ones(2) + 1

    assert total.tolist() == [2, 2]
    assert counter.unpriced == "odd: AssertionError('four axes')"
