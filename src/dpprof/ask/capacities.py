"""Capacities of several methods at once, of which ``advise`` and ``budget`` make their answers."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dpprof.ask.layout import format_number
from dpprof.ask.predictions import predict
from dpprof.ask.questions import multiply, refuse_repeated
from dpprof.experiments.config import registry
from dpprof.experiments.config.architecture import Architecture
from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.tasks import name_units
from dpprof.experiments.config.validation import InputError, refuse, spell
from dpprof.experiments.launch.forks import Forks
from dpprof.experiments.launch.progress import format_duration
from dpprof.experiments.planning.code_digest import code_digest, verdict_digest
from dpprof.experiments.records.answers import take_kept
from dpprof.experiments.records.record import ResultError
from dpprof.experiments.records.result import Result, read_run, result_path
from dpprof.experiments.records.verdict import Standing
from dpprof.results.analysis.advice.advice import describe
from dpprof.results.analysis.standings import read_standings
from dpprof.results.analysis.tables.axes import target_text
from dpprof.system.console import say
from dpprof.system.hardware import available_cores

INSTRUMENT = "capacity"
_FINAL = ("ok", "oom", "unsupported")
LISTS = ("dtype", "image_size", "seq_len", "checkpointing", "execution", "head")
"""Fields of which one may ask about several values: the first changes last."""

_AXES: dict[str, Callable[[Experiment], str]] = {
    "target": lambda experiment: target_text(experiment) or "",
    "model": lambda experiment: experiment.model_name,
    "method": lambda experiment: experiment.method,
    "dtype": lambda experiment: experiment.dtype,
    "tokens": lambda experiment: f"{experiment.seq_len:,}",
    "pixels": lambda experiment: str(experiment.image_size),
    "checkpointing": lambda experiment: experiment.checkpointing,
    "execution": lambda experiment: experiment.execution,
    "head": lambda experiment: experiment.head,
    "ranks": lambda experiment: "1" if experiment.parallel is None else experiment.parallel.text,
    "trained": lambda experiment: (
        "whole" if experiment.lora is None else f"LoRA {experiment.base_format or ''}".rstrip()
    ),
}
_FIGURES = {"largest batch": ">13", "safe batch": ">10", "speed": ">13", "after": ">9"}
"""What the progress says of a capacity, and how it is aligned."""


def read_verdicts(experiments: Sequence[Experiment]) -> dict[str, Standing]:
    """Return the standing of each experiment's method by the verdicts here, by experiment id."""
    return read_standings(Path(), experiments, verdict_digest)


def list_experiments(
    fields: Mapping[str, Any],
    methods: Sequence[str] | None = None,
    world_sizes: Sequence[int] | None = None,
) -> list[Experiment]:
    """Return one experiment per method, and per value of the fields with a list.

    Args:
        fields: Fields of an experiment; those in ``LISTS`` have a value or a list of values.
        methods: The methods; None for all.
        world_sizes: Numbers of ranks, where 1 is one process; None for the one in ``parallel``.

    Raises:
        InputError: A value is not allowed or given twice, or a required one is missing.
    """
    for name, why in (("method", "give methods, a list"), ("batch_size", "the largest is found")):
        if name in fields:
            raise refuse(spell(name), fields[name], f"{why}; leave it out")
    names = registry.names("methods") if methods is None else list(methods)
    for method in names:
        registry.check("methods", method, spell("methods"))
    for name, values in (("methods", names), ("world_sizes", list(world_sizes or ()))):
        if len(set(values)) < len(values):
            raise refuse_repeated(name, values)
    if fields.get("target") is None:
        raise InputError(
            f"{spell('target')}: missing; a target's name ({', '.join(registry.names('targets'))}) "
            "or a mapping of memory_bytes, flops_per_s and bandwidth_bytes_per_s"
        )
    axes = {k: list(fields[k]) for k in LISTS if isinstance(fields.get(k), list | tuple)}
    axes |= {"method": names, "batch_size": [1]}
    if world_sizes is not None:
        axes["parallel"] = _format_ranks(fields.get("parallel") or "kind=fsdp", world_sizes)
    return multiply(fields, **axes)


def _format_ranks(kind: Any, world_sizes: Sequence[int]) -> list[str | None]:
    """Return ``parallel`` for each number of ranks; None for one process.

    Raises:
        InputError: ``kind`` says how many ranks there are, too.
    """
    if "world_size" in kind:
        why = f"{spell('world_sizes')} says how many ranks; leave world_size out"
        raise refuse(spell("parallel"), kind, why)
    text = kind if isinstance(kind, str) else f"kind={kind.get('kind')}"
    return [None if size == 1 else f"{text},world_size={size}" for size in sorted(world_sizes)]


def find_capacities(experiments: Sequence[Experiment], root: Path, *, again: bool) -> list[Result]:
    """Find the capacity of each experiment, or read it from a result that is still valid.

    Each is printed at once as a row of a table. Batch sizes do not matter. ``root`` is the folder
    that holds ``results``; with ``again``, existing results are ignored. Where a function of this
    process builds the model, this process finds capacities one after another, and keeps none.
    """

    def find(experiment: Experiment) -> Result:
        kept = None if again else _read_known(root, experiment)
        log = root / "results" / "logs" / INSTRUMENT / f"{experiment.id}.r0.log"
        output = result_path(root, INSTRUMENT, experiment.id, 0)
        result = kept or predict(experiment, INSTRUMENT, output, log_path=log, forks=forks)
        tell(result)
        return result

    tell = _begin_progress(experiments)
    forks = Forks(_list_modules(experiments))
    if registry.is_lent(experiments[0].model):
        return list(map(find, experiments))
    pool = ThreadPoolExecutor(max_workers=available_cores())
    try:
        return list(pool.map(find, experiments))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # an interruption need not wait for workers


def _begin_progress(experiments: Sequence[Experiment]) -> Callable[[Result], None]:
    """Print the header of a table of capacities; return what prints the row of a result."""
    shown = {
        name: cell
        for name, cell in _AXES.items()
        if name == "method" or len(set(map(cell, experiments))) > 1
    }
    widths = {name: max(map(len, (name, *map(cell, experiments)))) for name, cell in shown.items()}
    forms = [
        f"{'>' if name in ('tokens', 'pixels') else '<'}{width}" for name, width in widths.items()
    ]
    forms += _FIGURES.values()

    def tell(*cells: str) -> None:
        say("  ".join(map(format, cells, forms)))

    def tell_capacity(result: Result) -> None:
        option = describe(result)
        figures = [
            format_number(option.largest_batch_size, ",", "none"),
            format_number(option.safe_batch_size, ",", "none"),
            format_number(option.tokens_per_s, ",.0f") if option.safe_batch_size else "",
            format_duration(result.wall_s),
        ]
        if result.error is not None:
            figures = [f"{result.outcome}: {result.error.message[:200]}"]
        tell(*(cell(result.experiment) for cell in shown.values()), *figures)

    speed = f"{name_units(experiments[0].image_size)}/s"
    tell(*shown, *(speed if name == "speed" else name for name in _FIGURES))
    return tell_capacity


def _list_modules(experiments: Sequence[Experiment]) -> list[str]:
    """Return the modules that capacities of these experiments need."""
    methods = dict.fromkeys(experiment.method for experiment in experiments)
    modules = ["torch._dynamo", "dpprof.predict.capacity", *registry.modules("methods", methods)]
    models = [experiment.model for experiment in experiments]
    kinds = {model.model_type for model in models if isinstance(model, Architecture)}
    for kind in sorted(kinds):
        modules += [
            f"transformers.models.{kind}.modeling_{kind}",
            "dpprof.subjects.models.hugging_face",
        ]
    modules += ["peft"] if any(experiment.lora for experiment in experiments) else []
    modules += ["bitsandbytes"] if any(experiment.base_format for experiment in experiments) else []
    return list(dict.fromkeys(modules))


def _read_known(root: Path, experiment: Experiment) -> Result | None:
    """Return a result that is still valid, from this folder or from the package."""
    path = result_path(root, INSTRUMENT, experiment.id, 0)
    digest = code_digest(INSTRUMENT, experiment)
    take_kept(path, holding=f'"code_digest": "{digest}"')
    try:
        result = read_run(root, INSTRUMENT, experiment.id, 0)
    except (FileNotFoundError, ResultError):
        return None
    return result if result.code_digest == digest and result.outcome in _FINAL else None
