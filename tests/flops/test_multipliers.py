"""What private training multiplies FLOPs by, on layers that are nothing but products.

The layers have no bias, and their input requires a gradient, so that every layer makes all the
products that the cost table in docs/methods.md has.
"""

import functools

import pytest
import torch
from memory_steps import executed, keep, linears
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from dpprof.predict.flops.counter import FlopCounter
from dpprof.predict.memory.events import Op
from dpprof.predict.memory.recorder import Recorder

B, D, LAYERS = 2, 128, 3
LONG, SHORT = 256, 16
"""Tokens of a sample: with the latter, what a gradient is made of is less than the gradient."""


def cost(method: str, T: int) -> int:
    """The cost table's FLOPs, per layer of D x D."""
    standard = 6 * B * T * D * D
    clipped_sum = 2 * B * D * D
    grams = 2 * B * T * T * 2 * D
    # One tile holds so few tokens whole; of more, a tiled product is cheaper here.
    norm = grams if T == SHORT else 2 * B * T * D * D
    return {
        "standard": standard,
        "opacus-hooks": standard * 8 // 6 + clipped_sum,
        "opacus-functorch": standard * 10 // 6 + clipped_sum,
        "opacus-ew": standard + clipped_sum,
        "opacus-fast-gradient-clipping": standard * 2,
        "opacus-per-layer": standard * 8 // 6 + clipped_sum,
        "opacus-ghost": standard * 10 // 6 + grams,
        "opacus-adaptive": standard * 10 // 6 + grams,
        "flash": standard * 8 // 6 + norm,
        # Of long samples the gradients are kept, and their norms come for nothing.
        "flash-bk": standard + (norm if T == SHORT else clipped_sum),
    }[method]


METHODS = (
    *("standard", "opacus-hooks", "opacus-functorch", "opacus-ew"),
    *("opacus-fast-gradient-clipping", "opacus-ghost", "opacus-per-layer", "opacus-adaptive"),
    *("flash", "flash-bk"),
)


@pytest.mark.parametrize("T", [LONG, SHORT])
@pytest.mark.parametrize("method", METHODS)
def test_executed_flops_are_those_of_the_cost_table_and_of_every_counter(method, T) -> None:
    pytorchs, own = FlopCounterMode(display=False), FlopCounter()

    def count(step) -> None:
        for counter in (pytorchs, own):
            with counter:
                step()

    build = functools.partial(linears, D, LAYERS)
    counted = executed(keep(method, build, run=count, batch_size=B, seq_len=T))

    assert counted == pytest.approx(LAYERS * cost(method, T), rel=0.02)
    assert (own.flops, own.unpriced) == (counted, None)
    if T == LONG:
        assert counted == pytest.approx(pytorchs.get_total_flops(), rel=0.005)


def closed(q: Tensor) -> int:
    """Two products of attention forward, and five backward, which makes the scores again."""
    samples, heads, T, width = q.shape
    return 7 * 2 * samples * heads * T * T * width


def test_where_pytorchs_counter_is_wrong_the_closed_formula_holds() -> None:
    """On a CPU it counts nothing for fused attention (pytorch#195460), and none of mv and dot.

    If this fails because it counts them, the cross-check above may include attention.
    """
    q = torch.randn(2, 4, 32, 16, requires_grad=True)
    a, x = torch.randn(8, 16), torch.randn(16)

    def work() -> None:
        nn.functional.scaled_dot_product_attention(q, q, q, is_causal=True).sum().backward()
        torch.dot(torch.mv(a, x), torch.ones(8))

    with FlopCounterMode(display=False) as counter:
        work()
    recorder = Recorder(is_there=lambda tensor, _: not tensor.is_meta)
    recorder.counting = True
    with recorder:
        work()
    costs = [event.cost for event in recorder.events if isinstance(event, Op)]

    assert counter.get_total_flops() == 0
    assert sum(one.flops for one in costs if one.family == "attention") == closed(q)
    assert sum(one.flops for one in costs if one.family == "matmul") == 2 * 8 * 16 + 2 * 8
