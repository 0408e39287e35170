"""Say which models can be trained privately on a GPU: whole, with LoRA, and with QLoRA.

Each row tells the largest batch that safely fits, tokens per second, and the hours and the price of
some tokens, or how much memory one sample needs. Each has a command that answers it alone.
"""

import itertools
import json
import shlex
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from pydantic import TypeAdapter, ValidationError

from dpprof.ask.answer import BatchAnswer, DataFrame, tabulate
from dpprof.ask.capacities import find_capacities
from dpprof.ask.commands.capacities import add_output_options, ask, check_outputs, print_answer
from dpprof.ask.commands.common import Parser, ending_in_a_sentence, positive
from dpprof.ask.defaults import add_defaults
from dpprof.ask.layout import fit_screen, format_number, lay_out, name_settings
from dpprof.ask.questions import make_experiment, refuse_repeated
from dpprof.experiments.config import registry
from dpprof.experiments.config.architecture import Architecture
from dpprof.experiments.config.quantities import NotNegative, Positive
from dpprof.experiments.config.target import Target
from dpprof.experiments.config.validation import InputError, one_of, option_name, refuse, spell
from dpprof.experiments.planning.code_digest import read_anew
from dpprof.experiments.records.result import Result
from dpprof.results.analysis.advice.advice import describe
from dpprof.system.words import three_digits

METHOD = "flash-bk"
HEADER = ("model", "trained", "tokens", "batch", "peak, MiB", "tokens/s", "hours", "price")

MODELS = (
    *("hf:qwen2.5-0.5b", "hf:llama-3.2-1b", "hf:qwen2.5-1.5b", "hf:llama-3.2-3b"),
    *("hf:llama-3.1-8b", "hf:qwen2.5-14b", "hf:qwen2.5-32b", "hf:llama-3.1-70b"),
)
"""What is asked about where no models are named: 0.5 to 70 billion parameters."""

SEQ_LENS = (1024, 4096)
CHECKPOINTING = "non-reentrant"
_MOST_ACROSS = 6
"""The most columns of ways and lengths; of more, lengths are rows."""

_NONE = "none"
"""A cell whose model does not fit, for another reason than the memory of one sample."""

_ADAPTERS = {"lora": "rank=16,target_modules=all-linear"}
WAYS: Mapping[str, Mapping[str, Any]] = {
    "whole": {"optimizer": "adamw-8bit"},
    "LoRA": _ADAPTERS,
    "QLoRA": {**_ADAPTERS, "quantization": "nf4-double"},
}
"""Ways of training: all parameters in float32 under autocast with moments of 8 bits; adapters over
a frozen model in 16 bits; and over one in 4 bits."""


class Cell(NamedTuple):
    """One model, trained in one way with samples of one length on one GPU."""

    target: str
    model: str
    way: str
    seq_len: int
    batch_size: int | None
    """The largest that safely fits; None where none does."""

    peak_bytes: int | None
    tokens_per_s: float | None
    hours: float | None
    price: float | None
    """The price of these hours; None where an hour has no price."""

    message: str | None
    """Why it does not fit, with the memory that one sample needs."""

    command: str


class Fits(BatchAnswer):
    """What fits on each GPU; hours and prices are for so many ``tokens``."""

    _short: ClassVar = (
        *("target", "model", "way", "seq_len", "batch_size", "tokens_per_s", "hours", "price"),
    )

    def __init__(self, cells: Sequence[Cell], tokens: float) -> None:
        self.cells = cells
        self.tokens = tokens

    @property
    def fits(self) -> bool:
        """Whether anything does."""
        return any(cell.batch_size for cell in self.cells)

    @property
    def sentence(self) -> str:
        """How many of the questions have a batch that fits."""
        fitting = sum(bool(cell.batch_size) for cell in self.cells)
        return f"{fitting} of {len(self.cells)} fit with {METHOD}."

    def __str__(self) -> str:
        """Return a table for each GPU, and the pattern of the commands that answer one cell."""
        groups = itertools.groupby(self.cells, lambda cell: cell.target)
        return "\n\n".join(format_fits(list(cells), self.tokens) for _, cells in groups)

    @property
    def details(self) -> str:
        """Every row with its peak and speed, and with the command that answers it alone."""
        lines: list[str] = []
        for target, group in itertools.groupby(self.cells, lambda cell: cell.target):
            cells = list(group)
            lines += [f"{target}:", *lay_out([HEADER, *map(list_cells, cells)], (0, 1))]
            lines += ["", *(cell.command for cell in cells), ""]
        return "\n".join(lines).rstrip()

    def table(self) -> DataFrame:
        """Return a row for each cell, with the command that finds it alone."""
        return tabulate(self.cells, Cell._fields)

    def to_json(self) -> str:
        """Return the cells."""
        cells = [cell._asdict() for cell in self.cells]
        return json.dumps({"tokens": self.tokens, "cells": cells}, indent=1)


def fits(
    target: str | Sequence[str],
    models: Sequence[str] = MODELS,
    *,
    ways: Sequence[str] = tuple(WAYS),
    seq_lens: Sequence[int] = SEQ_LENS,
    tokens: float = 10e6,
    price_per_hour: float | None = None,
    again: bool = False,
) -> Fits:
    """Say which models can be trained privately on a GPU, how, and what it costs.

    Blocks are checkpointed, clipping is flat, and numbers have the 16 bits that the GPU multiplies
    fast. ``advise`` answers what differs from this; each cell has its command.

    Args:
        target: A GPU's name, or several.
        models: Models' names.
        ways: Some of ``whole``, ``LoRA`` and ``QLoRA``.
        seq_lens: Tokens in a sample.
        tokens: The tokens that the hours and the price are for.
        price_per_hour: The price of a GPU for an hour, in any currency.
        again: Whether to ignore what is kept, in results and the package.

    Raises:
        InputError: A value is not allowed or given twice.

    Example:
        >>> import dpprof
        >>> told = dpprof.fits("l4", ["hf:tiny-llama"], ways=["whole"], seq_lens=[64])
        >>> told.cells[0].batch_size > 1000
        True
    """
    read_anew()
    targets = [target] if isinstance(target, str) else list(target)
    asked = {"target": targets, "models": models, "ways": ways, "seq_lens": seq_lens}
    for name, values in asked.items():
        if isinstance(values, str) or not values:
            raise refuse(spell(name), values, "give a list with one value or more")
        if len(set(values)) < len(values):
            raise refuse_repeated(name, values)
    for way in ways:
        if way not in WAYS:
            raise refuse(spell("ways"), way, one_of(WAYS, way))
    _check("tokens", tokens, Positive, "it must be a number above 0")
    _check("price_per_hour", price_per_hour, NotNegative | None, "it must be a number from 0 on")
    keys = list(itertools.product(targets, models, ways, seq_lens))
    questions = [_ask(*key) for key in keys]
    for model in models:
        whole = _ask(targets[0], model, "whole", seq_lens[0])
        experiment = make_experiment(whole, for_question=True)
        if not isinstance(experiment.model, Architecture) or experiment.task != "causal-lm":
            raise InputError(
                f"{spell('models')}: {experiment.model_name} is no causal language model of "
                "Hugging Face; dpprof advise answers for others"
            )
    experiments = [make_experiment(question, for_question=True) for question in questions]
    results = find_capacities(experiments, Path(), again=again)
    answers = zip(keys, questions, results, strict=True)
    return Fits([_fill(*answer, tokens, price_per_hour) for answer in answers], tokens)


def _ask(target: str, model: str, way: str, seq_len: int) -> dict[str, Any]:
    registry.check("targets", target, spell("target"))
    device = registry.load("targets", target)
    if not isinstance(device, Target):
        raise refuse(spell("target"), target, "give a GPU's name; dpprof advise answers for a CPU")
    fields = {"model": model, "method": METHOD, "target": target, "seq_len": seq_len}
    fields |= {"checkpointing": CHECKPOINTING, "batch_size": 1}
    in_16_bits = add_defaults({"target": target})["dtype"]
    fields |= {"parameters_dtype": in_16_bits} if way == "LoRA" else {}
    return fields | dict(WAYS[way])


def _check(name: str, value: Any, kind: Any, allowed: str) -> None:
    try:
        TypeAdapter(kind).validate_python(value, strict=True)
    except ValidationError:
        raise refuse(spell(name), value, allowed) from None


def _fill(
    key: tuple[str, str, str, int],
    fields: Mapping[str, Any],
    result: Result,
    tokens: float,
    price_per_hour: float | None,
) -> Cell:
    """Return what a capacity says, with the command that answers this question alone."""
    option = describe(result)
    speed = option.tokens_per_s if option.safe_batch_size else None
    hours = tokens / speed / 3600 if speed else None
    message = option.message
    if option.largest_batch_size:
        message = f"{option.largest_batch_size:,}, with nothing to spare"
    return Cell(
        *key,
        batch_size=option.safe_batch_size,
        peak_bytes=option.safe_peak_bytes,
        tokens_per_s=speed,
        hours=hours,
        price=None if hours is None or price_per_hour is None else hours * price_per_hour,
        message=None if option.safe_batch_size else message,
        command=_spell_command(fields),
    )


def _spell_command(fields: Mapping[str, Any]) -> str:
    options = {option_name(k): v for k, v in fields.items() if k not in ("method", "batch_size")}
    options["--methods"] = fields["method"]
    words = [word for name, value in options.items() for word in (name, str(value))]
    return shlex.join(["dpprof", "advise", *words])


def format_fits(cells: Sequence[Cell], tokens: float) -> str:
    """Return what fits on one GPU as text that fits a screen."""
    target = cells[0].target
    fitting = sum(bool(cell.batch_size) for cell in cells)
    by_price = any(cell.price is not None for cell in cells)
    ways, lengths = ({getattr(cell, name): None for cell in cells} for name in ("way", "seq_len"))
    is_wide = len(ways) * len(lengths) > _MOST_ACROSS
    across = list(itertools.product(ways, (None,) if is_wide else lengths))
    is_narrow = len(across) <= _MOST_ACROSS // 2
    shown = ["hours"] * (is_narrow or not by_price) + ["price"] * by_price
    rows: dict[tuple[str, ...], dict[tuple[str, int | None], str]] = {}
    for cell in cells:
        key = (cell.model.removeprefix("hf:"), *([f"{cell.seq_len:,}"] if is_wide else ()))
        where = (cell.way, None if is_wide else cell.seq_len)
        rows.setdefault(key, {})[where] = _tell_cell(cell, shown)
    header = ["model", *(["tokens"] if is_wide else ())]
    header += [way if length is None else f"{way} {length:,}" for way, length in across]
    heads = [""] * (len(header) - len(across)) + [_align("batch", *shown)] * len(across)
    table = [
        header,
        heads,
        *([*key, *(found.get(where, "") for where in across)] for key, found in rows.items()),
    ]
    usual = add_defaults({"target": target, "method": METHOD})
    optimizers = dict.fromkeys(WAYS[way].get("optimizer", usual["optimizer"]) for way in ways)
    execution = usual.get("execution", "eager")
    settings = name_settings(usual["dtype"], " or ".join(optimizers), execution)
    of_tokens = " and ".join(shown)
    pattern, *options = spell_pattern(target, ways)
    without = (cell.message for cell in cells if _tell_cell(cell, shown) == _NONE)
    why = next(without, None)
    return fit_screen(
        [
            f"{fitting} of {len(cells)} fit on {target} with {METHOD} ({settings}).",
            f"Largest batch, {of_tokens} of {tokens:,.0f} tokens; or the GiB that a sample needs.",
        ],
        lay_out(table, texts=(0,)),
        [
            *([f"{_NONE}: {why}"] if why else []),
            f"To ask for one: {pattern}",
            *(f"  {text}" for text in options),
            "All is predicted. Peaks, speeds and each command: --details.",
        ],
    )


def spell_pattern(target: str, ways: Iterable[str]) -> list[str]:
    """Return the pattern of the commands that ask about one model, and the options of each way."""
    asked = {"target": target, "checkpointing": CHECKPOINTING, "method": METHOD}
    lines = [_spell_command({"model": "MODEL", "seq_len": "TOKENS", **asked})]
    for way in ways:
        fields = _ask(target, "", way, 1)
        names = [name for name in ("parameters_dtype", *WAYS[way]) if name in fields]
        lines.append(f"{way}: {' '.join(f'{option_name(n)} {fields[n]}' for n in names)}")
    return lines


def _tell_cell(cell: Cell, shown: Sequence[str]) -> str:
    """Return the batch with hours and a price; where nothing fits, what one sample needs."""
    if not cell.batch_size:
        mib = tell_need(cell.message or "").removeprefix("needs ").partition(" MiB")[0]
        is_known = mib.replace(",", "").isdecimal()
        return f"{int(mib.replace(',', '')) / 1024:,.0f} GiB" if is_known else _NONE
    texts = {"hours": three_digits(cell.hours), "price": format_number(cell.price, ",.2f")}
    return _align(f"{cell.batch_size:,}", *(texts[name] for name in shown))


def _align(batch: str, *figures: str) -> str:
    """Return the texts of a cell, or the heads above them."""
    return f"{batch:>5}" + "".join(f"{text:>7}" for text in figures)


def list_cells(cell: Cell) -> list[str]:
    """Return a row of ``HEADER``; where nothing fits, with what one sample needs."""
    asked = [cell.model.removeprefix("hf:"), cell.way, f"{cell.seq_len:,}"]
    if not cell.batch_size or cell.peak_bytes is None:
        return [*asked, tell_need(cell.message or ""), "", "", "", ""]
    return [
        *asked,
        f"{cell.batch_size:,}",
        f"{cell.peak_bytes / 2**20:,.0f}",
        format_number(cell.tokens_per_s, ",.0f"),
        format_number(cell.hours, ",.1f"),
        format_number(cell.price, ",.2f", ""),
    ]


def tell_need(message: str) -> str:
    """Return what one sample needs, from the sentence that refuses it; else the sentence."""
    need = message.partition(" needs ")[2].partition(" for ")[0]
    return f"needs {need}" if need else message


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line; the exit status is 1 where nothing fits."""
    parser = Parser("fits", __doc__, example="--target rtx-4090 --price-per-hour 0.4")
    parser.add_argument("--target", nargs="+", required=True, metavar="GPU", help="targets' names")
    lists: tuple[tuple[str, str, Sequence[Any], Any, str], ...] = (
        ("--models", "MODEL", MODELS, str, "models' names"),
        ("--ways", "WAY", tuple(WAYS), str, "how they are trained"),
        ("--seq-lens", "N", SEQ_LENS, positive, "tokens in a sample"),
    )
    for name, metavar, usual, kind, about in lists:
        told = f"{about} (default: {' '.join(map(str, usual))})"
        parser.add_argument(
            name, nargs="+", type=kind, default=list(usual), metavar=metavar, help=told
        )
    parser.add_argument(
        "--tokens",
        type=float,
        default=10e6,
        metavar="N",
        help="how many tokens the hours and the price are for (default: 10 million)",
    )
    parser.add_argument(
        "--price-per-hour", type=float, metavar="PRICE", help="price of a GPU for an hour"
    )
    add_output_options(parser)
    arguments = parser.parse_args(argv)
    with ending_in_a_sentence():
        check_outputs(arguments)
        of_output = ("json", "csv", "details")
        options = {k: value for k, value in vars(arguments).items() if k not in of_output}
        print_answer(ask(fits, options), arguments)
