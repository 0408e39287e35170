"""What `dpprof advise` says of several numbers of GPUs, as text."""

from collections.abc import Sequence

from dpprof.ask.layout import format_number, lay_out
from dpprof.experiments.records.advice import OnGpus
from dpprof.results.analysis.advice.scaling import find_fastest
from dpprof.system.numbers import three_digits

_HEADER = (
    *("GPUs", "method", "safe batch", "tokens/s", "90 % interval", "per GPU", "efficiency"),
    "GPU hours per 1e9 tokens",
)


def format_gpus(found: Sequence[OnGpus]) -> list[str]:
    """Say which number of GPUs is the cheapest, which the fastest, and what each brings.

    Args:
        found: Methods on several numbers of GPUs; nothing is said where no speed is predicted.
    """
    fastest = find_fastest(found)
    if not fastest:
        return []
    cheap = min(fastest, key=lambda one: one.gpu_hours_per_billion)
    fast = max(fastest, key=lambda one: one.tokens_per_s)
    small = min(fastest, key=lambda one: one.gpus)
    hours = three_digits(cheap.gpu_hours_per_billion)
    said = f"Cheapest: {_name(cheap)}, {hours} GPU hours for a billion tokens. "
    said += f"Fastest: {_name(fast)}, {fast.tokens_per_s:,.0f} tokens/s. Smallest: {_name(small)}."
    return [
        said,
        *lay_out([_HEADER, *map(_cells, fastest)], texts=(1,)),
        "Efficiency: tokens/s of a GPU over those with the fewest GPUs that train with the method.",
    ]


def _name(one: OnGpus) -> str:
    return f"{one.method} on {one.gpus:,} GPU{'s' if one.gpus > 1 else ''}"


def _cells(one: OnGpus) -> tuple[str, ...]:
    low, high = one.tokens_per_s_low or 0.0, one.tokens_per_s_high or 0.0
    return (
        f"{one.gpus:,}",
        one.method,
        f"{one.safe_batch_size:,}",
        f"{one.tokens_per_s:,.0f}",
        f"{low:,.0f} to {high:,.0f}",
        format_number(one.tokens_per_s_per_gpu, ",.0f"),
        f"{one.efficiency:.0%}",
        three_digits(one.gpu_hours_per_billion),
    )
