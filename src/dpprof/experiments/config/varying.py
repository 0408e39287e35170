"""Batches that differ from step to step: in length, or in their number of samples."""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator, BeforeValidator

from dpprof.experiments.config.quantities import Count, Positive, read_pairs

if TYPE_CHECKING:
    from dpprof.experiments.config.experiment import Experiment


Shares = tuple[tuple[Count, Positive], ...]  # lengths, each with the share of batches that have it

_read_text = read_pairs("128=40,512=25")


def _read_lengths(value: Any) -> Any:
    """Return pairs of a length and a number of batches, for a mapping or a text."""
    value = _read_text(value)
    return tuple(value.items()) if isinstance(value, Mapping) else value


def _scale_shares(lengths: Shares) -> Shares:
    """Return lengths with shares that sum to one, the shortest first."""
    total = sum(number for _, number in lengths)
    if not lengths or len(dict(lengths)) < len(lengths):
        raise ValueError("it must name at least one length, and each once")
    return tuple((length, number / total) for length, number in sorted(lengths))


AsLengths = Annotated[
    Shares,
    BeforeValidator(_read_lengths, json_schema_input_type=dict[Count, Positive] | Shares | str),
    AfterValidator(_scale_shares),
]


def spell_lengths(lengths: Shares) -> str:
    """Return lengths in a cell of a table: ``128 (0.25), 256 (0.75)``."""
    return ", ".join(f"{length:,} ({share:.3g})" for length, share in lengths)


def settle_length(seq_len: Any, lengths: Shares | None) -> Any:
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
