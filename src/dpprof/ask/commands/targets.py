"""List the GPUs that predictions are for by name: their limits, and where these are from."""

import textwrap
from collections.abc import Sequence

from dpprof.ask.commands.common import Parser
from dpprof.ask.layout import WIDTH, lay_out
from dpprof.experiments.config import registry
from dpprof.experiments.config.datasheets import list_targets

_HEADS = ("target", "GiB", "GB/s", "16 bits", "source")


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    Parser("targets", __doc__).parse_args(argv)
    rows: list[tuple[str, ...]] = [_HEADS]
    others: dict[str, list[str]] = {}
    own = list_targets()
    for name, target in own.items():
        sheet = target.source.removeprefix("NVIDIA ").partition(",")[0]
        limits = (target.memory_bytes / 2**30, target.bandwidth_bytes_per_s / 1e9)
        told = [f"{limit:,.1f}" for limit in limits]
        rows.append((name, *told, f"{(target.peak('float16') or 0) / 1e12:,.1f}", sheet))
        for other in registry.names("targets"):
            if other not in own and registry.load("targets", other) == target:
                others.setdefault(name, []).append(other)
    print("\n".join(lay_out(rows, texts=(0, 4))))
    also = "; ".join(f"{name} is also {', '.join(names)}" for name, names in others.items())
    about = (
        "GiB: what training can take, without the context of CUDA. 16 bits: TFLOP/s of dense "
        f"products. {also[:1].upper()}{also[1:]}. Any other GPU is a mapping: docs/methods.md."
    )
    print(textwrap.fill(about, WIDTH, break_on_hyphens=False))
