"""What does correlated noise cost? Steps with eight bands beside steps with one.

A small stack of linear layers, AdamW, clipped by ``flash-bk``. Both train in one process, a step of
the one, a step of the other, in CPU time of one thread. The first row is one band beside another of
itself: what the machine's noise alone makes of a ratio. The claim: at most 1.25 times.
"""

import time

import torch
from torch import nn

from dpprof.private import BookKeeping, NoisyOptimizer, make_strategy
from interleave import MIN_PAIRS, Side, conclude, measure, timed
from script import at_least, describe_place, make_parser

WIDTH, LAYERS, B, T = 512, 8, 16, 32
STEPS = 10**5
"""More than are taken: no step may follow them."""

ROWS = {
    "1 band / 1 band": ("banded", 1, "device"),
    "banded, 8 bands / 1 band": ("banded", 8, "device"),
    "bisr, 8 bands / 1 band": ("bisr", 8, "device"),
    "banded, 8 bands, noise_buffers cpu / 1 band": ("banded", 8, "cpu"),
}
CLAIM = 1.25


def prepare(noise: str, bands: int, place: str) -> Side:
    """Return what takes a step, and returns its CPU seconds."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))
    clipping = BookKeeping(model, max_grad_norm=1.0)
    optimizer = NoisyOptimizer(
        torch.optim.AdamW(model.parameters()),
        clipping,
        noise_multiplier=1.0,
        expected_batch_size=B,
        strategy=make_strategy(noise, steps=STEPS, bands=bands),
        noise_buffers=place,
    )
    x_BTd = torch.randn(B, T, WIDTH)

    def step() -> None:
        clipping.backward(model(x_BTd).square().mean((1, 2)))
        optimizer.step()
        optimizer.zero_grad()

    step()
    return timed(step, steps=2, clock=time.process_time)


def main() -> None:
    """Run from the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--pairs", **at_least(MIN_PAIRS, 30))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    base = prepare("banded", 1, "device")
    rows = [
        measure(name, prepare(*settings), base, arguments.pairs) for name, settings in ROWS.items()
    ]
    shape = f"{LAYERS} layers of {WIDTH} x {WIDTH}, {B} samples of {T} tokens"
    place = f"{describe_place('torch', threads=1)}; {shape}"
    conclude(__doc__, place, rows, arguments.output, CLAIM)


if __name__ == "__main__":
    main()
