"""What `dpprof advise` says of several numbers of GPUs, as text."""

from collections.abc import Sequence

from dpprof.ask.layout import format_number, lay_out
from dpprof.experiments.records.advice import OnGpus
from dpprof.results.analysis.advice.advice import find_fastest
from dpprof.system.numbers import three_digits

_HEADER = (
    *("GPUs", "method", "safe batch", "tokens/s", "90 % interval", "per GPU", "efficiency"),
    "GPU hours per 1e9 tokens",
)


def format_gpus(options: Sequence[OnGpus]) -> list[str]:
    """Say which number of GPUs is the cheapest, which the fastest, and what each brings.

    Args:
        options: Methods on several numbers of GPUs; nothing is said where no speed is predicted.
    """
    fastest = find_fastest(options)
    if not fastest:
        return []
    cheap = min(fastest, key=lambda option: option.gpu_hours_per_billion)
    fast = max(fastest, key=lambda option: option.tokens_per_s)
    small = min(fastest, key=lambda option: option.gpus)
    hours = three_digits(cheap.gpu_hours_per_billion)
    said = f"Cheapest: {_name(cheap)}, {hours} GPU hours for a billion tokens. "
    said += f"Fastest: {_name(fast)}, {fast.tokens_per_s:,.0f} tokens/s. Smallest: {_name(small)}."
    return [
        said,
        *lay_out([_HEADER, *map(_cells, fastest)], texts=(1,)),
        "Efficiency: tokens/s of a GPU over those with the fewest GPUs that train with the method.",
    ]


def _name(option: OnGpus) -> str:
    return f"{option.method} on {option.gpus:,} GPU{'s' if option.gpus > 1 else ''}"


def _cells(option: OnGpus) -> tuple[str, ...]:
    low, high = option.tokens_per_s_low or 0.0, option.tokens_per_s_high or 0.0
    return (
        f"{option.gpus:,}",
        option.method,
        f"{option.safe_batch_size:,}",
        f"{option.tokens_per_s:,.0f}",
        f"{low:,.0f} to {high:,.0f}",
        format_number(option.tokens_per_s_per_gpu, ",.0f"),
        f"{option.efficiency:.0%}",
        three_digits(option.gpu_hours_per_billion),
    )
