"""A head and its loss: private without logits, beside plain with logits, in one process.

Each side is forward and backward of a head, float32, random hidden states that need a gradient, on
all cores: plain is ``torch.nn.functional.cross_entropy`` of the head's logits; private is
``dpprof.clipping.linear_cross_entropy`` under ``BookKeeping``, which also clips a norm before it.
Sides take turns.
"""

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpprof.clipping import BookKeeping, linear_cross_entropy
from dpprof.system.console import say
from interleave import measure
from script import make_parser, publish

SHAPES = [(4, 512, 512, 32_000), (4, 1024, 512, 32_000), (2, 512, 1024, 128_256)]
"""Samples, tokens, width and vocabulary."""


class Head(nn.Module):
    """A norm and a head."""

    def __init__(self, d: int, V: int, *, is_frozen: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, V, bias=False).requires_grad_(not is_frozen)


def make_sides(
    shape: tuple[int, int, int, int], *, is_frozen: bool
) -> tuple[Callable[[], float], Callable[[], float]]:
    """Return what runs and times the private side, and the plain one."""
    B, T, d, V = shape
    torch.manual_seed(0)
    x_BTd, labels_BT = torch.randn(B, T, d), torch.randint(V, (B, T))
    plain, private = (Head(d, V, is_frozen=is_frozen) for _ in range(2))
    clipping = BookKeeping(private, 1.0)

    def run_plain() -> None:
        plain.zero_grad()
        logits_NV = plain.head(plain.norm(x_BTd)).flatten(0, 1)
        functional.cross_entropy(logits_NV, labels_BT.flatten()).backward()  # type: ignore[no-untyped-call]

    def run_private() -> None:
        private.zero_grad()
        losses_BT: Tensor = linear_cross_entropy(private.norm(x_BTd), private.head, labels_BT)
        clipping.backward(losses_BT.mean(1))

    run_private()  # the first batch is verified
    return lambda: _time(run_private), lambda: _time(run_plain)


def _time(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def main() -> None:
    """Run from the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=10)
    arguments = parser.parse_args()
    lines = [
        "| B | T | d | V | head | private / plain | 95 % interval |",
        "| ---: | ---: | ---: | ---: | --- | ---: | --- |",
    ]
    for shape in SHAPES:
        for is_frozen in (False, True):
            sides = make_sides(shape, is_frozen=is_frozen)
            found = measure("head", *sides, arguments.pairs)
            low, high = found.interval
            sizes = " | ".join(f"{size:,}" for size in shape)
            kind = "frozen" if is_frozen else "trained"
            lines.append(f"| {sizes} | {kind} | {found.ratio:.2f} | {low:.2f} to {high:.2f} |")
            say(lines[-1])
    publish(__doc__, "\n".join(lines), arguments.output)


if __name__ == "__main__":
    main()
