"""Capacities of several methods at once, of which ``advise`` and ``budget`` make their answers."""

import contextlib
import itertools
import shutil
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dpprof.ask.defaults import find_target
from dpprof.ask.predictions import predict
from dpprof.ask.questions import multiply, refuse_repeated
from dpprof.experiments.config import registry
from dpprof.experiments.config.architecture import Architecture
from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.validation import refuse, spell
from dpprof.experiments.launch.forks import Forks
from dpprof.experiments.launch.progress import format_duration
from dpprof.experiments.planning.code_digest import code_digest, verdict_digest, verified_as
from dpprof.experiments.records.answers import take_kept
from dpprof.experiments.records.record import ResultError
from dpprof.experiments.records.result import Result, read_run, result_path
from dpprof.experiments.records.verdict import Standing, verdict_path
from dpprof.results.analysis.standings import read_standings
from dpprof.system.console import printable
from dpprof.system.hardware import available_cores

INSTRUMENT = "capacity"
_FINAL = ("ok", "oom", "unsupported")
_BLANK = "\r\x1b[2K"  # goes to the begin of the terminal's line, and clears it
LISTS = ("dtype", "image_size", "seq_len", "checkpointing", "execution", "head")
"""Fields of which one may ask about several values: the first changes last."""


def read_verdicts(experiments: Sequence[Experiment]) -> dict[str, Standing]:
    """Return the standing of each experiment's method, by experiment id.

    The verdicts are those here, and those on this code that come with the package.
    """
    for label, method in dict.fromkeys((verified_as(e), e.method) for e in experiments):
        digest = verdict_digest(label, method)
        take_kept(verdict_path(Path(), label, method), holding=f'"code_digest": "{digest}"')
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
        fields = {**find_target(), **fields}
    axes = {k: list(fields[k]) for k in LISTS if isinstance(fields.get(k), list | tuple)}
    axes |= {"method": names, "batch_size": [1]}
    if world_sizes is not None:
        axes["parallel"] = _format_ranks(fields.get("parallel") or "kind=fsdp", world_sizes)
    return multiply(fields, **axes)


def _format_ranks(kind: Any, world_sizes: Sequence[int]) -> list[str | None]:
    """Return ``parallel`` for each number of ranks, None for 1; refuse a kind with a number."""
    if "world_size" in kind:
        why = f"{spell('world_sizes')} says how many ranks; leave world_size out"
        raise refuse(spell("parallel"), kind, why)
    text = kind if isinstance(kind, str) else f"kind={kind.get('kind')}"
    return [None if size == 1 else f"{text},world_size={size}" for size in sorted(world_sizes)]


def find_capacities(
    experiments: Sequence[Experiment],
    root: Path,
    *,
    again: bool,
    beside: Future[Any] | None = None,
) -> list[Result]:
    """Find the capacity of each experiment, or read it from a result that is still valid.

    A line on a terminal counts them. Batch sizes do not matter. ``root`` is the folder that holds
    ``results``; with ``again``, existing results are ignored. Where a function of this process
    builds the model, this process finds capacities one after another, and keeps none. What is asked
    ``beside`` them ends the search where it fails, which raises its error.
    """

    def find(experiment: Experiment) -> Result:
        if beside is not None and beside.done():
            beside.result()
        kept = None if again else _read_known(root, experiment)
        log = root / "results" / "logs" / INSTRUMENT / f"{experiment.id}.r0.log"
        output = result_path(root, INSTRUMENT, experiment.id, 0)
        result = kept or predict(experiment, INSTRUMENT, output, log_path=log, forks=forks)
        tell(result)
        return result

    forks = Forks(_list_modules(experiments))
    with _counting(len(experiments)) as tell:
        if registry.is_lent(experiments[0].model):
            return list(map(find, experiments))
        # The last ones end together, rather than one alone.
        pool = ThreadPoolExecutor(max_workers=available_cores() + 1)
        try:
            return list(pool.map(find, experiments))
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # an interruption waits for no worker


def _list_modules(experiments: Sequence[Experiment]) -> list[str]:
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


@contextlib.contextmanager
def _counting(total: int) -> Iterator[Callable[[Result], None]]:
    """Yield what counts a capacity on a terminal's last line, which goes away in the end.

    Threads may call it at the same time.
    """
    lock, numbers = threading.Lock(), itertools.count(1)

    def tell(result: Result) -> None:
        experiment, capacity = result.experiment, result.capacity
        what = f"{experiment.method} on {experiment.model_name}, {experiment.dtype}"
        if capacity is not None:
            what += f": a batch of {capacity.batch_size:,} fits"
        elif result.error is not None:
            what += f": {result.outcome}: {result.error.message}"
        with lock:
            took = format_duration(result.wall_s)
            _write(f"{next(numbers)} of {total} found, in {took}: {what}")

    _write(f"0 of {total} found")
    try:
        yield tell
    finally:
        _write("")


def _write(text: str) -> None:
    if not sys.stderr.isatty():
        return
    most = shutil.get_terminal_size().columns - 1
    line = printable(f"dpprof: {text}" if text else "").replace("\n", " ")
    with contextlib.suppress(OSError):  # a closed terminal is no error
        sys.stderr.write(_BLANK + (line if len(line) <= most else f"{line[: most - 3]}..."))
        sys.stderr.flush()
