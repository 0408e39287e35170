"""Say how large a batch fits on a GPU that need not be here, and which private method to use.

--model takes one value; --dtype, --seq-len and --image-size take one or more. For several values,
the answer is a table of the fastest method for each combination. --checkpointing best tries every
way of checkpointing; dpprof then judges each method by its fastest checkpointing that fits.
--head best tries every way to the loss, and says what the fastest brings.
"""

import argparse
import itertools
import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, get_args

from dpprof.ask.advice_details import detail_advice
from dpprof.ask.advice_text import (
    compare_ways,
    format_advice,
    format_gpus,
    format_winners,
    list_smallest_ranks,
    recommend,
)
from dpprof.ask.answer import BatchAnswer, DataFrame, Figure, load_figure, tabulate
from dpprof.ask.capacities import LISTS, find_capacities, list_experiments, read_verdicts
from dpprof.ask.capacity import explain_batches, explain_safety
from dpprof.ask.commands.capacities import ask, make_parser, print_answer, read_question
from dpprof.ask.commands.common import DRAWING, ending_in_a_sentence, save_figure
from dpprof.ask.questions import naming
from dpprof.ask.remedies import list_remedies
from dpprof.experiments.config.architecture import Architecture
from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.tasks import name_size
from dpprof.experiments.config.validation import one_of, refuse, spell
from dpprof.experiments.records.advice import Advice, OnGpus
from dpprof.experiments.records.result import Result
from dpprof.experiments.records.verdict import Standing
from dpprof.results.analysis.advice.advice import BEST, compare_gpus
from dpprof.results.analysis.advice.advice import advise as rank
from dpprof.results.analysis.standings import find_signs
from dpprof.system.files import check_writable

_WAYS: tuple[str, ...] = get_args(Experiment.model_fields["checkpointing"].annotation)
_HEADS: tuple[str, ...] = get_args(Experiment.model_fields["head"].annotation)
_ASKED = (
    *("model", "lora", "target", "parallel", "dtype", "seq_len", "image_size", "execution", "head"),
)
"""What a row of the table is about."""

ByRanks = Mapping[int, Sequence[Result]]


class Advised(BatchAnswer):
    """The methods, ranked for each dtype, size and number of ranks that was asked about.

    Args:
        results: The capacities. The first one's experiment has the adapters that were asked for.
        standings: What is known of the methods, by id of an experiment.
    """

    _short: ClassVar = (
        *("dtype", "seq_len", "image_size", "method", "verdict", "safe_batch_size"),
        *("tokens_per_s", "tokens_per_s_low", "tokens_per_s_high", "safe_peak_bytes"),
    )

    def __init__(self, results: Sequence[Result], standings: Mapping[str, Standing]) -> None:
        self.results = results
        first = results[0].experiment
        self._alike = _group(results)
        self.advices = [
            _rank(first, on_ranks, standings)
            for by_ranks in self._alike.values()
            for on_ranks in by_ranks.values()
        ]

    @property
    def sentence(self) -> str:
        """Which method to use, for each question."""
        return " ".join(map(recommend, self.advices))

    @property
    def fits(self) -> bool:
        """Whether a batch safely fits with any method."""
        return any(option.safe_batch_size for advice in self.advices for option in advice.options)

    @property
    def gpus(self) -> list[OnGpus]:
        """What each number of GPUs brings; empty for several dtypes or sizes, or one number."""
        if len(self._alike) > 1 or len(self.advices) == 1:
            return []
        return compare_gpus(self.advices)

    def __str__(self) -> str:
        advices, results = self.advices, self.results
        others = compare_ways(advices)
        if len(advices) == 1:
            return format_advice(advices[0], [*others, *list_remedies(results)])
        for (dtype, size, *_), by_ranks in self._alike.items():
            where = f"{dtype} {size}: " if len(self._alike) > 1 else ""  # one execution and head
            on_any = list(itertools.chain.from_iterable(by_ranks.values()))
            others += [f"{where}{line}" for line in list_smallest_ranks(on_any)]
        others += list_remedies(results)
        if len(self._alike) == 1:
            return format_gpus(self.gpus, advices, others)
        return format_winners(advices, others)

    @property
    def details(self) -> str:
        """Every column, why methods are missing, and what each number rests on."""
        is_one = len(self.advices) == 1 and self.advices[0].checkpointing != BEST
        explain = explain_batches if is_one else explain_safety
        return "\n".join([*detail_advice(self.advices), *explain(self.results)])

    def table(self) -> DataFrame:
        """Return a row for each method of each question, the best first."""
        return tabulate(
            side.model_dump(include=set(_ASKED)) | option.model_dump()
            for advice in self.advices
            for side in advice.sides
            for option in side.options
        )

    def plot(self) -> Figure:
        """Draw tokens per second over sequence lengths, or over numbers of GPUs and their cost.

        Raises:
            InputError: There is one length and one number of GPUs, or matplotlib is not installed.
        """
        lengths = {advice.seq_len for advice in self.advices}
        if self.gpus:
            return load_figure("prices:draw_ranks", "plot")({"advice": self.table()})
        if len(lengths) == 1:
            raise refuse_short_figure("plot", *lengths)
        draw = load_figure("advice", "plot")
        options = [option for a in self.advices for side in a.sides for option in side.options]
        return draw(self.advices, find_signs(options))

    def to_json(self) -> str:
        """Return the advice; a list where there are several."""
        dumped = [advice.model_dump(mode="json") for advice in self.advices]
        return json.dumps(dumped[0] if len(dumped) == 1 else dumped, indent=1)


def refuse_short_figure(key: str, value: Any) -> Exception:
    """Return the error that refuses to draw one sequence length."""
    why = f"it shows sequence lengths; give {spell('seq_len')} two or more"
    return refuse(key, value, why)


def _group(results: Sequence[Result]) -> Mapping[tuple[str, str, str, str], ByRanks]:
    """Group results by what was asked, and those by the number of ranks.

    Where methods have executions of their own, by default, they are compared all the same.
    """
    ways = {(result.experiment.method, result.experiment.execution) for result in results}
    are_asked = len(ways) > len({method for method, _ in ways})
    alike: dict[tuple[str, str, str, str], dict[int, list[Result]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for result in results:
        asked = result.experiment
        size = name_size(asked.seq_len, asked.image_size)
        execution = asked.execution if are_asked else ""
        alike[asked.dtype, size, execution, asked.head][asked.world_size].append(result)
    return alike


def _rank(
    asked_first: Experiment, results: Sequence[Result], standings: Mapping[str, Standing]
) -> Advice:
    """Rank the methods on one number of ranks, with adapters and without."""
    asked = [result for result in results if result.experiment.lora == asked_first.lora]
    whole = [result for result in results if result.experiment.lora != asked_first.lora]
    advice = rank(asked, standings)
    if whole:
        advice = advice.model_copy(update={"whole": rank(whole, standings)})
    return advice


def advise(
    model: str | dict[str, Any] | Callable[[Experiment], Any],
    *,
    methods: Sequence[str] | None = None,
    world_sizes: Sequence[int] | None = None,
    again: bool = False,
    **experiment: Any,
) -> Advised:
    """Say how large a batch fits on a GPU that need not be here, and which private method to use.

    Args:
        model: The model, as ``estimate`` takes it.
        methods: The methods to compare; all of them by default.
        world_sizes: The numbers of ranks to compare.
        again: Whether to ignore what is kept, in results and the package.
        **experiment: Every other option of ``dpprof advise``; lists where that takes several.

    Raises:
        InputError: A value is not allowed or given twice, or a required one is missing.

    Example:
        >>> import dpprof
        >>> told = dpprof.advise("tiny", methods=["flash-bk"], target="h100", seq_len=64)
        >>> told.advices[0].best.method
        'flash-bk'
    """
    with naming({"model": model, **experiment}) as fields:
        asked = list_questions(fields, methods, world_sizes)
        standings = read_verdicts(asked)
        return Advised(find_capacities(asked, Path(), again=again), standings)


def list_questions(
    fields: Mapping[str, Any],
    methods: Sequence[str] | None = None,
    world_sizes: Sequence[int] | None = None,
) -> list[Experiment]:
    """Return the experiments that ``advise`` is about.

    A model that gets adapters is also asked about without them. ``best`` stands for every way of
    checkpointing, and for every head.

    Raises:
        InputError: A value is not allowed or given twice, or a required one is missing.
    """
    settled = dict(fields)
    ways = _as_list(fields.get("checkpointing", []))
    if len(ways) > 1:
        why = f"give one way, or {BEST} alone, which tries each"
        raise refuse(spell("checkpointing"), " ".join(ways), why)
    if ways:
        if ways[0] not in {*_WAYS, BEST}:
            raise refuse(spell("checkpointing"), ways[0], one_of([*_WAYS, BEST], ways[0]))
        settled["checkpointing"] = list(_WAYS) if ways == [BEST] else ways
    if _as_list(fields.get("head")) == [BEST]:
        settled["head"] = list(_HEADS)
    asked = list_experiments(settled, methods, world_sizes)
    return asked + [whole for experiment in asked if (whole := _without_lora(experiment))]


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _without_lora(experiment: Experiment) -> Experiment | None:
    """Return the experiment that trains the whole model; None where there is no other such."""
    is_stated = isinstance(experiment.model, Architecture) and experiment.model.quantization
    if experiment.lora is None or is_stated:
        return None  # the model's own config says that its weights are quantised
    others = {"lora": None, "trainable": None, "quantization": None}
    return Experiment.model_validate(experiment.model_dump() | others)


def read_options(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse options, and refuse what only this command refuses.

    Raises:
        InputError: An option's value is not allowed.
    """
    notes = {
        "checkpointing": f"{BEST}: try each way, and judge each method by its fastest that fits",
        "head": f"{BEST}: try each, and say what it brings",
    }
    parser = make_parser("advise", __doc__, several=("model", *LISTS), notes=notes)
    parser.add_argument(
        "--figure",
        **DRAWING,
        help="also draw tokens per second over several sequence lengths, or numbers of ranks: a "
        ".png, .pdf or .svg",
    )
    parser.add_argument("--batch-size", nargs="*", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.batch_size is not None:
        why = "advise finds the largest batch that fits; leave it out"
        raise refuse("--batch-size", " ".join(arguments.batch_size), why)
    if arguments.model is not None:
        models = arguments.model
        if len(models) > 1:
            raise refuse("--model", " ".join(models), "give one model, and call once for each")
        [arguments.model] = models
    if arguments.figure is not None:
        if all(len(values or ()) < 2 for values in (arguments.seq_len, arguments.world_sizes)):  # noqa: PLR2004 (a line has two ends)
            raise refuse_short_figure(spell("figure"), str(arguments.figure))
        load_figure("advice", spell("figure"))
        check_writable(arguments.figure)
    return arguments


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line; the exit status is 1 where no method safely fits."""
    with ending_in_a_sentence():
        arguments = read_options(argv)
        advised = ask(advise, read_question(arguments))
        if arguments.figure is not None:
            assert isinstance(advised, Advised)
            save_figure(advised.plot(), arguments.figure)
        print_answer(advised, arguments)
