"""Batches that differ from step to step: in length, or in their number of samples."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, BeforeValidator

from dpprof.experiments.config.quantities import Count, Positive, read_pairs

if TYPE_CHECKING:
    from dpprof.experiments.config.experiment import Experiment


Lengths = tuple[tuple[Count, Positive], ...]  # each with the number of batches that have it


def _read_lengths(value: Any) -> Any:
    """Return pairs of a length and a number of batches, for a mapping or a text."""
    value = read_pairs(value, "128=40,512=25")
    return tuple(value.items()) if isinstance(value, Mapping) else value


def _sort_lengths(lengths: Lengths) -> Lengths:
    """Return lengths, the shortest first, with the numbers as they were given.

    A digest names an experiment, and numbers that are scaled again whenever it is read would drift.
    """
    if not lengths or len(dict(lengths)) < len(lengths):
        raise ValueError("it must name at least one length, and each once")
    return tuple(sorted(lengths))


AsLengths = Annotated[
    Lengths,
    BeforeValidator(_read_lengths, json_schema_input_type=dict[Count, Positive] | Lengths | str),
    AfterValidator(_sort_lengths),
]


def share_lengths(lengths: Lengths) -> list[tuple[int, float]]:
    """Return lengths with their shares of the batches, which sum to one."""
    total = sum(number for _, number in lengths)
    return [(length, number / total) for length, number in lengths]


def spell_lengths(lengths: Lengths) -> str:
    """Return lengths in a cell of a table: ``128 (0.25), 256 (0.75)``."""
    return ", ".join(f"{length:,} ({share:.3g})" for length, share in share_lengths(lengths))


def settle_length(seq_len: Any, lengths: Lengths | None) -> Any:
    """Return the tokens of the longest batch, which may be left out, or raise ``ValueError``."""
    if lengths is None:
        return seq_len
    longest, _ = lengths[-1]
    if seq_len is None or str(seq_len) == str(longest):
        return longest
    raise ValueError(f"lengths go up to {longest:,}; leave seq_len out, or give that")


def list_variations(experiment: "Experiment") -> list[str]:
    """Return the keys by which batches differ from step to step."""
    return [name for name in ("lengths", "poisson") if getattr(experiment, name)]


def refuse_variation(experiment: "Experiment") -> Iterator[str]:
    """Yield a sentence for each key with which batches cannot vary."""
    varied = list_variations(experiment)
    if experiment.empty_cache_every is not None and not varied:
        yield "empty_cache_every requires lengths or poisson: equal steps reserve equally much"
    if experiment.lengths is not None and experiment.image_size is not None:
        yield "lengths requires a model that reads text, and this one reads images"
    for name in varied:
        if experiment.execution != "eager":
            yield f"{name} requires execution eager: a graph is of batches of one shape"
        if experiment.accumulation > 1 or experiment.parallel is not None:
            yield f"{name} requires one process and accumulation 1, which have one batch a step"
