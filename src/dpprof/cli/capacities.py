"""What ``advise`` and ``budget`` share: capacities of several methods at once, and their layout."""

import argparse
import os
import sys
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

from dpprof.analysis.advice.advice import describe
from dpprof.analysis.standings import DAGGER, DOUBLE_DAGGER, Marks, read_standings
from dpprof.cli.common import Parser, ending_in_a_sentence, path, positive
from dpprof.cli.options import add_experiment_options, read_experiments, refuse_repeated
from dpprof.launch.forks import Forks
from dpprof.launch.progress import format_duration
from dpprof.launch.supervisor import supervise
from dpprof.planning.code_digest import code_digest, verdict_digest
from dpprof.records.advice import Option
from dpprof.records.answers import take_kept
from dpprof.records.budget import MethodCost
from dpprof.records.record import ResultError
from dpprof.records.result import Result, read_run, result_path
from dpprof.records.verdict import Standing
from dpprof.spec import registry
from dpprof.spec.architecture import Architecture
from dpprof.spec.experiment import Experiment
from dpprof.spec.mechanisms import is_other_mechanism
from dpprof.spec.tasks import name_units
from dpprof.spec.validation import InputError, option_name, refuse
from dpprof.system.console import printable, say
from dpprof.system.files import check_writable, write_atomically
from dpprof.system.hardware import available_cores

INSTRUMENT = "capacity"
_FINAL = ("ok", "oom", "unsupported")
LISTS = ("dtype", "image_size", "seq_len", "checkpointing", "execution", "head")
"""Fields of which a command may be asked about several values: the first changes last."""

_AXES: dict[str, Callable[[Experiment], str]] = {
    "method": lambda one: one.method,
    "dtype": lambda one: one.dtype,
    "tokens": lambda one: f"{one.seq_len:,}",
    "pixels": lambda one: str(one.image_size),
    "checkpointing": lambda one: one.checkpointing,
    "execution": lambda one: one.execution,
    "head": lambda one: one.head,
    "ranks": lambda one: "1" if one.parallel is None else one.parallel.text,
    "trained": lambda one: "whole" if one.lora is None else "LoRA",
}
_FIGURES = {"largest batch": ">13", "safe batch": ">10", "speed": ">13", "after": ">9"}
"""What the progress says of a capacity, and how it is aligned."""

Judge = Callable[[Sequence[Experiment], Sequence[Result]], tuple[str, str, bool]]
"""Returns of results: JSON, a text, and whether a batch fits with any method."""


def make_parser(
    command: str,
    about: str | None,
    example: str = "",
    several: Container[str] = (),
    notes: Mapping[str, str] = MappingProxyType({}),
) -> Parser:
    """Make the options of a subcommand that finds capacities.

    ``example`` adds to its example; options for the fields in ``several`` take one or more values;
    ``notes`` adds to the help of fields.
    """
    parser = Parser(
        command,
        about,
        example=f"--model 1b --target h200 --seq-len 1024{example}. --memory-limit-bytes replaces "
        "the target's memory.",
    )
    parser.add_argument("--methods", nargs="+", metavar="METHOD", help="the methods (default: all)")
    parser.add_argument(
        "--world-sizes",
        nargs="+",
        type=positive,
        metavar="N",
        help="the numbers of ranks to compare; 1 means one process without DDP or FSDP2. "
        "--parallel gives the kind of parallel training, without world_size (default: kind=fsdp)",
    )
    parser.add_argument(
        "--json", type=path, metavar="FILE", help="write the results as JSON to this file"
    )
    parser.add_argument(
        "--again",
        action="store_true",
        help="ignore what is kept, in results and the package",
    )
    leave_out = ("method", "batch_size")
    add_experiment_options(parser, leave_out=leave_out, several=several, notes=notes)
    return parser


def read_verdicts(experiments: Sequence[Experiment]) -> dict[str, Standing]:
    """Return the standing of each experiment's method by the verdicts here, by experiment id."""
    return read_standings(Path(), experiments, verdict_digest)


def find_signs(methods: Iterable[Option | MethodCost]) -> Marks:
    """Return the methods that bear each sign."""
    known = list(methods)
    return {
        DAGGER: [one.method for one in known if not one.verified],
        DOUBLE_DAGGER: [one.method for one in known if is_other_mechanism(one.mechanism)],
    }


def explain_signs(signs: Marks) -> list[str]:
    """Return a line for each sign that a method bears."""
    meanings = {
        DAGGER: f"{DAGGER} Not verified here to compute the right gradient; dpprof verify "
        "--output results/verify/<model>-<method>.json does.",
        DOUBLE_DAGGER: f"{DOUBLE_DAGGER} Another mechanism than flat clipping; docs/methods.md.",
    }
    return [meanings[one] for one, methods in signs.items() if methods]


def group_messages(messages: Iterable[tuple[str, str | None]]) -> list[str]:
    """Return a line for each message, with the methods that it is about."""
    methods: dict[str, list[str]] = {}
    for method, message in messages:
        if message is not None and method not in methods.setdefault(message, []):
            methods[message].append(method)
    return [f"{', '.join(named)}: {message}" for message, named in methods.items()]


def format_number(value: float | None, form: str, otherwise: str = "unknown") -> str:
    """Return a number as text; another text where it is not known."""
    return otherwise if value is None else format(value, form)


def answer(arguments: argparse.Namespace, judge: Judge, *, whole_too: bool = False) -> None:
    """Find capacities and print what ``judge`` says; the exit status is 1 where no batch fits.

    With ``whole_too``, a model that gets adapters is also asked about without them.
    """
    with ending_in_a_sentence():
        experiments = read_capacity_options(arguments)
        if whole_too:
            experiments += [whole for one in experiments if (whole := _without_lora(one))]
        if arguments.json is not None:
            check_writable(arguments.json)
        results = find_capacities(experiments, Path(), again=arguments.again)
        json, text, fits = judge(experiments, results)
        if arguments.json is not None:
            write_atomically(arguments.json, json + "\n")
    print(printable(text))
    sys.exit(0 if fits else 1)


def _without_lora(experiment: Experiment) -> Experiment | None:
    """Return the experiment that trains the whole model; None where there is no other such."""
    if experiment.lora is None or experiment.base_format != experiment.quantization:
        return None  # the model's own config says that its weights are quantised
    others = {"lora": None, "trainable": None, "quantization": None}
    return Experiment.model_validate(experiment.model_dump() | others)


def read_capacity_options(arguments: argparse.Namespace) -> list[Experiment]:
    """Return one experiment per method from parsed options, and per value of those with a list.

    Raises:
        InputError: An option's value is not allowed or given twice, or a required one is missing.
    """
    methods = arguments.methods or registry.names("methods")
    for method in methods:
        registry.check("methods", method, "--methods")
    for option in ("methods", "world_sizes"):
        given = getattr(arguments, option) or ()
        if len(set(given)) < len(given):
            raise refuse_repeated(option_name(option), given)
    if arguments.target is None:
        raise InputError(
            f"--target: missing; a target's name ({', '.join(registry.names('targets'))}) or a "
            "mapping of memory_bytes, flops_per_s and bandwidth_bytes_per_s"
        )
    given = {name: getattr(arguments, name, None) for name in LISTS}
    axes: dict[str, list[Any]] = {k: v for k, v in given.items() if isinstance(v, list)}
    axes |= {"method": list(methods), "batch_size": [1]}
    if arguments.world_sizes is not None:
        axes["parallel"] = _format_ranks(arguments.parallel or "kind=fsdp", arguments.world_sizes)
    return read_experiments(arguments, **axes)


def _format_ranks(kind: str, world_sizes: Sequence[int]) -> list[str | None]:
    """Return ``parallel`` for each number of ranks; None for one process.

    Raises:
        InputError: ``kind`` says how many ranks there are, too.
    """
    if "world_size" in kind:
        raise refuse("--parallel", kind, "--world-sizes says how many ranks; leave world_size out")
    return [None if size == 1 else f"{kind},world_size={size}" for size in sorted(world_sizes)]


def find_capacities(experiments: Sequence[Experiment], root: Path, *, again: bool) -> list[Result]:
    """Find the capacity of each experiment, or read it from a result that is still valid.

    Each is printed as soon as it is known, as a row of a table. Batch sizes do not matter. ``root``
    is the folder that holds ``results``; with ``again``, existing results are ignored.
    """

    def find(experiment: Experiment) -> Result:
        known = None if again else _read_known(root, experiment)
        log = root / "results" / "logs" / INSTRUMENT / f"{experiment.id}.r0.log"
        output = result_path(root, INSTRUMENT, experiment.id, 0)
        result = known or supervise(experiment, INSTRUMENT, 0, output, log, forks=forks)
        tell(result)
        return result

    tell = _begin_progress(experiments)
    forks = Forks(_list_modules(experiments))
    pool = ThreadPoolExecutor(max_workers=available_cores())
    try:
        return list(pool.map(find, experiments))
    except KeyboardInterrupt:
        # The workers die with this process, so an interruption need not wait for them.
        os._exit(130)


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
    methods = dict.fromkeys(one.method for one in experiments)
    modules = [
        "torch._dynamo",
        "dpprof.instruments.capacity",
        *registry.modules("methods", methods),
    ]
    model = experiments[0].model
    if isinstance(model, Architecture):
        kind = model.model_type
        modules += [f"transformers.models.{kind}.modeling_{kind}", "dpprof.models.hugging_face"]
        modules += ["peft"] if any(one.lora for one in experiments) else []
    return modules


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
