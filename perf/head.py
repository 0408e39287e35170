"""A head and its loss: private without logits, beside plain with logits, in one process.

In the first table each side is forward and backward of a head, float32, random hidden states that
need a gradient, on all cores: plain is ``torch.nn.functional.cross_entropy`` of the head's logits;
private is ``dpprof.private.linear_cross_entropy`` under ``BookKeeping``, which also clips a norm
before it. A head that is trained computes its output gradients again, or keeps them. In the second
each side is a whole step: flash-bk with a head in chunks, and standard with logits. Sides take
turns.

The claims: a head that is trained and keeps gradients takes at most 1.4 times plain's time, one
that is frozen no more than plain's; a whole step at most 1.1 times.
"""

from functools import partial

import torch
from torch import Tensor, nn
from torch.nn import functional

from dpprof.private import BookKeeping, linear_cross_entropy
from dpprof.system.console import say
from interleave import Comparison, Side, measure, prepare, timed
from script import end, ignore, lay_out, make_parser, publish

SHAPES = [(4, 512, 512, 32_000), (4, 1024, 512, 32_000), (2, 512, 1024, 128_256)]
"""Samples, tokens, width and vocabulary."""

STEPS = [(4, 512, 512, 32_000), (2, 512, 1024, 128_256)]
LAYERS = 8
KINDS = {"trained": 1.4, "kept": 1.4, "frozen": 1.0}
"""What a head may be, and the most that it may take; what is computed again is only told."""

LIMIT = 1.1
"""Of a whole step."""


class Head(nn.Module):
    """A norm and a head."""

    def __init__(self, d: int, V: int, *, is_frozen: bool) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, V, bias=False).requires_grad_(not is_frozen)


Shape = tuple[int, int, int, int]


def make_sides(shape: Shape, kind: str) -> tuple[Side, Side]:
    """Return what runs and times the private side, and the plain one."""
    B, T, d, V = shape
    is_frozen = kind == "frozen"
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
        hidden_BTd = private.norm(x_BTd)
        losses_BT: Tensor = linear_cross_entropy(
            hidden_BTd, private.head, labels_BT, keep=kind == "kept"
        )
        clipping.backward(losses_BT.mean(1))

    run_private()  # the first batch is verified
    return timed(run_private), timed(run_plain)


def make_steps(shape: Shape, head: str) -> tuple[Side, Side]:
    """Return what runs and times a private step, and a plain one with logits."""
    B, T, d, V = shape
    model = {"vocab_size": V, "d_model": d, "layers": LAYERS, "heads": d // 64}
    fields = {"model": model, "batch_size": B, "seq_len": T}
    runs = []
    for method, way in (("flash-bk", head), ("standard", "logits")):
        training = prepare({**fields, "method": method, "head": way})
        run = partial(training.step.run, training.batch, ignore)
        run()
        runs.append(timed(run))
    return runs[0], runs[1]


def main() -> None:
    """Run from the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=10)
    arguments = parser.parse_args()
    heads: list[list[str]] = []
    steps: list[list[str]] = []
    failures: list[str] = []
    for shape in SHAPES:
        for kind, limit in KINDS.items():
            pairs = measure(kind, *make_sides(shape, kind), arguments.pairs)
            heads.append(_tell(shape, pairs))
            if kind != "trained" and pairs.ratio > limit:
                failures.append(f"{shape}, {kind}: {pairs.ratio:.2f}, more than {limit}")
    for shape in STEPS:
        for head in ("chunked", "kept"):
            pairs = measure(head, *make_steps(shape, head), arguments.pairs)
            steps.append(_tell(shape, pairs))
            if head == "kept" and pairs.ratio > LIMIT:
                failures.append(f"{shape}, a step: {pairs.ratio:.2f}, more than {LIMIT}")
    columns = ("B:", "T:", "d:", "V:", "head", "private / plain:", "95 % interval")
    lines = [*lay_out(columns, heads), "", f"Whole steps, {LAYERS} blocks:", ""]
    lines += lay_out(columns, steps)
    lines += ["", *(f"* missed: {failure}" for failure in failures)] if failures else []
    publish(__doc__, "\n".join(lines), arguments.output)
    end("slower than claimed", failures)


def _tell(shape: Shape, pairs: Comparison) -> list[str]:
    low, high = pairs.interval
    cells = [*(f"{size:,}" for size in shape), pairs.name]
    cells += [f"{pairs.ratio:.2f}", f"{low:.2f} to {high:.2f}"]
    say(" ".join(cells))
    return cells


if __name__ == "__main__":
    main()
