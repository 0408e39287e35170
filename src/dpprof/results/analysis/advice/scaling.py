"""What more GPUs bring: speed, efficiency and the cost of tokens, by method and number of GPUs."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, TypeVar

from dpprof.experiments.records.advice import Advice, OnGpus

if TYPE_CHECKING:
    import pandas as pd

_BILLION = 10**9
_HOUR_S = 3600

_Speed = TypeVar("_Speed", float, "pd.Series[float]")


def hours_of_billion(tokens_per_s_per_gpu: _Speed) -> _Speed:
    """Return the GPU hours for a billion tokens, at the speed of each GPU."""
    return _BILLION / tokens_per_s_per_gpu / _HOUR_S


def compare_gpus(advices: Iterable[Advice]) -> list[OnGpus]:
    """Compare numbers of GPUs for each method, the fewest GPUs first.

    Every number of GPUs trains with the largest safe batch of each. Efficiency is the speed of a
    GPU over that with the fewest GPUs on which the method has a predicted speed.

    Args:
        advices: What is advised for each number of ranks, of all that is compared otherwise.
    """
    compared: list[OnGpus] = []
    first: dict[str, tuple[int, float]] = {}
    for advice in sorted(advices, key=lambda advice: advice.gpus):
        for option in advice.options:
            speed = option.tokens_per_s
            if speed is None or not option.safe_batch_size or option.verdict == "wrong":
                continue
            each = speed / advice.gpus
            fewest, reference = first.setdefault(option.method, (advice.gpus, each))
            compared.append(
                OnGpus(
                    method=option.method,
                    private=option.private,
                    gpus=advice.gpus,
                    safe_batch_size=option.safe_batch_size,
                    tokens_per_s=speed,
                    tokens_per_s_low=option.tokens_per_s_low,
                    tokens_per_s_high=option.tokens_per_s_high,
                    tokens_per_s_per_gpu=each,
                    efficiency=each / reference,
                    fewest_gpus=fewest,
                    gpu_hours_per_billion=hours_of_billion(each),
                )
            )
    return compared


def find_fastest(options: Sequence[OnGpus]) -> list[OnGpus]:
    """Return for each number of GPUs the fastest private method."""
    private = [option for option in options if option.private]
    sizes = dict.fromkeys(option.gpus for option in private)
    return [
        max((o for o in private if o.gpus == size), key=lambda option: option.tokens_per_s)
        for size in sizes
    ]
