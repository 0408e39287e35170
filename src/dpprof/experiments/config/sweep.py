"""Expands a config into runs: multiplies grids, fills in defaults and drops exclusions."""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, cast

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, field_validator

from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.naming import Name
from dpprof.experiments.config.privacy import Privacy
from dpprof.experiments.config.quantities import Replicates, one_or_many, optional
from dpprof.experiments.config.target import settle_device
from dpprof.experiments.config.validation import InputError, explain, refuse

MAX_RUNS = 100_000  # a config with more runs than this counts as a mistake


class Run(NamedTuple):
    """One replicate of an experiment under an instrument: one process and one JSON."""

    experiment: Experiment
    instrument: str
    replicate: int


def _make_grid(kind: str, doc: str, **others: Any) -> type[BaseModel]:
    """Make a mapping of every field of an experiment, for one value or a list, and of others."""
    fields: dict[str, Any] = {}
    for name, info in Experiment.model_fields.items():
        item = Annotated[info.annotation, *info.metadata] if info.metadata else info.annotation
        if info.discriminator is not None:
            item = Annotated[item, Field(discriminator=info.discriminator)]
        if name == "device":
            item = Literal["auto", "cpu", "cuda"]
        fields[name] = (one_or_many(item), optional(str(info.description)))
    strict = ConfigDict(extra="forbid")
    model = create_model(kind, __config__=strict, __doc__=doc, **fields, **others)
    return cast("type[BaseModel]", model)


Exclude = _make_grid(
    "Exclude", "Combinations to drop: an experiment matches if all keys given here match."
)
Sweep = _make_grid(
    "Sweep",
    "A grid of experiments: every combination of the values in lists.",
    instruments=(
        one_or_many(Name),
        optional("the instruments to run each experiment under, one process each"),
    ),
    replicates=(
        Replicates,
        optional("number of fresh processes for each experiment and instrument"),
    ),
)

Image = Annotated[str, Field(pattern=r"^[A-Za-z0-9./][A-Za-z0-9+._/:@-]{0,500}$")]
"""An image, as docker://NAME or a path: what no shell takes for anything else."""

SweepName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$")]


class Config(BaseModel, extra="forbid"):
    """The config file."""

    defaults: Sweep = Field(  # type: ignore[valid-type]
        default_factory=Sweep, description="values for keys that a sweep leaves out"
    )
    sweeps: dict[SweepName, Sweep] = Field(  # type: ignore[valid-type]
        min_length=1,
        description="sweeps by name; each is a grid of experiments, or none, which leaves it out",
    )
    exclude: list[Exclude] = Field(  # type: ignore[valid-type]
        default_factory=list, description="combinations to drop from every sweep"
    )
    privacy: Privacy | None = optional(
        "a privacy budget, whose price the report tells from capacity results"
    )
    partial: bool = Field(
        False, description="report on the results that exist, list missing ones and run nothing"
    )
    container: Image | None = optional("the image that jobs run in under snakemake --sdm apptainer")

    @field_validator("sweeps", mode="before")
    @classmethod
    def _leave_out(cls, sweeps: Any) -> Any:
        """Leave out sweeps that are the word none."""
        if not isinstance(sweeps, dict):
            return sweeps
        return {name: sweep for name, sweep in sweeps.items() if sweep != "none"}


def parse_config(raw: Any, names: Mapping[str, Sequence[str]] | None = None) -> Config:
    """Validate a config mapping.

    ``names`` are those that exist, by key, for the message about one that does not.

    Raises:
        InputError: The config is not valid; the message has one sentence per problem, with key,
            value and what is allowed.
    """
    for key in raw if isinstance(raw, dict) else ():  # an empty file is none
        if key in Sweep.model_fields and key not in Config.model_fields:
            raise InputError(
                f"{key}: is a key of defaults and of sweeps, not of the config itself; on "
                f"Snakemake's command line: --config 'defaults={{{key}: ...}}'"
            )
    try:
        return Config.model_validate(raw)
    except ValidationError as error:
        raise explain(error, Config, names=names) from None


def stated_keys(grid: BaseModel) -> dict[str, Any]:
    """Return the keys that are set in a grid, each with a list of values."""
    return {name: getattr(grid, name) for name in grid.model_fields_set}


def expand(config: Config, resolve_device: Callable[[], str]) -> dict[str, list[Run]]:
    """Return the runs of each sweep, by its name; the same run may be in several.

    ``resolve_device`` returns the device for ``device: auto``; it is called at most once.

    Raises:
        InputError: A sweep leaves out a required key, or has too many runs.
    """
    auto = functools.cache(resolve_device)
    defaults = stated_keys(config.defaults)
    sweeps = {name: defaults | stated_keys(sweep) for name, sweep in config.sweeps.items()}
    _refuse_missing(sweeps)
    _refuse_too_many(sweeps)
    excluded = [stated_keys(entry) for entry in config.exclude]
    for keys in excluded:
        if "device" in keys:
            keys["device"] = [auto() if device == "auto" else device for device in keys["device"]]
    dropped = [{key: set(values) for key, values in keys.items()} for keys in excluded if keys]
    runs: dict[str, list[Run]] = {}
    for name, keys in sweeps.items():
        instruments = keys.get("instruments", ["clean"])
        watched = list(itertools.product(instruments, range(keys.get("replicates", 1))))
        runs[name] = [
            Run(experiment, *how)
            for experiment in _multiply(name, keys, auto)
            if not any(
                all(getattr(experiment, key) in values for key, values in entry.items())
                for entry in dropped
            )
            for how in watched
        ]
    if not any(runs.values()):
        raise refuse("exclude", excluded, "it must leave at least one experiment")
    return runs


def _multiply(sweep: str, keys: dict[str, Any], auto: Callable[[], str]) -> Iterator[Experiment]:
    axes = {name: keys[name] for name in Experiment.model_fields if name in keys}
    for values in itertools.product(*axes.values()):
        fields = dict(zip(axes, values, strict=True))
        settled = settle_device(fields, auto, f"sweeps.{sweep}.device")
        try:
            yield Experiment.model_validate(settled)
        except ValidationError as error:
            raise InputError(f"sweeps.{sweep}: {explain(error, Experiment)}") from None


def _refuse_missing(sweeps: dict[str, dict[str, Any]]) -> None:
    required = [name for name, info in Experiment.model_fields.items() if info.is_required()]
    for sweep, keys in sweeps.items():
        for name in required:
            if name not in keys and name != "device":
                raise InputError(
                    f"sweeps.{sweep}.{name}: missing; write it in the sweep or in defaults"
                )


def _refuse_too_many(sweeps: dict[str, dict[str, Any]]) -> None:
    """Refuse too many runs, counted before grids are expanded."""
    total = 0
    for name, keys in sweeps.items():
        lengths = [len(value) for value in keys.values() if isinstance(value, list)]
        count = math.prod(lengths) * keys.get("replicates", 1)
        total += count
        if total > MAX_RUNS:
            raise InputError(
                f"sweeps.{name}: {count:,} runs are not allowed; a config may have at most "
                f"{MAX_RUNS:,} in all, so shorten a list or lower replicates"
            )
