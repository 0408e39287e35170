"""Measure what a device can do at most, and leave one JSON file.

The exit status is 0 whenever the JSON was written: what could not be measured is null in it,
with the reason.
"""

import argparse
from collections.abc import Sequence

from dpprof.ask.commands.common import Parser, ending_in_a_sentence, path
from dpprof.experiments.config.experiment import read_spec
from dpprof.experiments.launch.ceilings_run import OPERATORS_S, measure_apart
from dpprof.experiments.records.ceilings import Ceilings, device_name
from dpprof.system.console import say

LONGEST_S = 24 * 3600


def seconds(text: str) -> int:
    """Read a number of seconds."""
    if not (text.isascii() and text.isdecimal() and 0 < int(text) <= LONGEST_S):
        raise argparse.ArgumentTypeError(
            f"{text[:80]!r} is not allowed; it must be a whole number from 1 to {LONGEST_S}"
        )
    return int(text)


def format_ceilings(ceilings: Ceilings) -> str:
    """Return the figures in one line."""
    figures: dict[str, str] = {
        dtype: f"{product.flops_per_s / 1e9:,.0f} GFLOP/s"
        for dtype, product in ceilings.matmul.items()
        if product is not None
    }
    if ceilings.bandwidth is not None:
        figures["copies"] = f"{ceilings.bandwidth.bytes_per_s / 1e9:,.1f} GB/s"
    if ceilings.launch_latency_s is not None:
        figures["a launch"] = f"{ceilings.launch_latency_s * 1e6:.2f} us"
    if ceilings.operators is not None:
        figures["operators"] = f"{len(ceilings.operators.operators):,} timed"
    said = ", ".join(f"{name} {figure}" for name, figure in figures.items())
    why = "; ".join(dict.fromkeys(ceilings.reasons.values()))
    text = said or f"not measured: {why[:300]}"
    return f"ceilings of {device_name(ceilings.device)} after {ceilings.wall_s:.0f} s: {text}"


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = Parser("ceilings", __doc__)
    parser.add_argument(
        "--device", required=True, choices=["cpu", "cuda"], help="the processor, or a visible GPU"
    )
    parser.add_argument("--output", type=path, required=True, help="the ceilings' file to write")
    parser.add_argument(
        "--operators-of",
        type=path,
        nargs="*",
        default=[],
        metavar="SPEC",
        help="on a cpu: spec files of experiments whose operators are timed; predictions of step"
        " times for this processor rest on these times",
    )
    parser.add_argument(
        "--operators-s",
        type=seconds,
        default=OPERATORS_S,
        help=f"about how many seconds timing operators may take (default: {OPERATORS_S})",
    )
    arguments = parser.parse_and_log(argv, "what else is printed")
    with ending_in_a_sentence("no ceilings were written"):
        for spec in arguments.operators_of:
            read_spec(spec)
        ceilings = measure_apart(
            arguments.device, arguments.output, arguments.operators_of, arguments.operators_s
        )
    say(format_ceilings(ceilings))
