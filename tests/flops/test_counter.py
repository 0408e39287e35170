"""FLOPs of users' loops; test_multipliers.py has those of whole steps."""

import torch
from torch import nn

from dpprof.predict.flops import counter as counter_module
from dpprof.predict.flops.counter import FlopCounter

B, T, D = 2, 64, 32


def counted(run) -> int:
    counter = FlopCounter()
    with counter:
        run()
    assert counter.unpriced is None
    return counter.flops


def test_composite_operators_and_attention_are_counted_in_inference_mode_too() -> None:
    layer, x = nn.Linear(D, D), torch.randn(B, T, D)
    q, attend = torch.ones(2, 3, 8, 16), nn.functional.scaled_dot_product_attention
    with torch.inference_mode():
        assert counted(lambda: layer(x)) == 2 * B * T * D * D
        assert counted(lambda: attend(q, q, q)) == 2 * 2 * 2 * 3 * 8 * 8 * 16


def test_a_product_without_a_formula_is_named() -> None:
    of_bytes = torch.ones(16, 32, dtype=torch.int8)
    a, scales = torch.ones(4, 32).bfloat16(), torch.ones(16).bfloat16()
    counter = FlopCounter()
    with counter:
        torch.ops.aten._weight_int8pack_mm(a, of_bytes, scales)

    assert counter.unpriced == "_weight_int8pack_mm: no formula is known"


def test_compiled_code_stays_compiled() -> None:
    runs = []

    def backend(graph, _):
        return lambda *args: runs.append("compiled") or graph(*args)

    layer = torch.compile(nn.Linear(D, D, bias=False), backend=backend)
    x = torch.randn(B, T, D)

    assert counted(lambda: layer(x)) == 2 * B * T * D * D
    layer(x)
    assert runs == ["compiled"] * 2
    torch._dynamo.reset()


def test_an_operator_without_a_price_is_named_and_ends_nothing(monkeypatch) -> None:
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
