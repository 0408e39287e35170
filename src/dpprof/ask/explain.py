"""Explain why one run needs more memory than another: by component, layer and operator.

A and B are any two result files of the instruments memory, estimate or capacity: other methods,
batch sizes, models, targets; recorded or predicted. With --loop, B is A's experiment in another
training loop, and is predicted. The bars lead from B's peak to A's, and sum to the difference of
the two with 0 bytes left.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from dpprof.ask.answer import Answer, DataFrame, Figure, load_figure, tabulate
from dpprof.ask.commands import common
from dpprof.ask.difference_text import Detail, render_text, say
from dpprof.ask.estimate import Predicted
from dpprof.ask.predictions import PredictionError, predict
from dpprof.ask.questions import make_experiment
from dpprof.experiments.config.architecture import Architecture
from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.loops import LOOPS
from dpprof.experiments.config.validation import InputError, spell
from dpprof.experiments.records.record import ResultError
from dpprof.experiments.records.result import Result, read_result, result_path
from dpprof.private.number_formats import KEPT_LOGITS, SHORT
from dpprof.results.analysis.difference.difference import explain_difference
from dpprof.results.analysis.difference.waterfall import LEVELS, format_size, list_holdings
from dpprof.system.console import printable
from dpprof.system.files import check_writable

Peak = str | Path | Result | Predicted
"""A result, its file, or what ``estimate`` or ``capacity`` returned."""


def _size_logits(experiment: Experiment) -> str:
    """Return what logits of a batch take, as a sentence begins; nothing where no one says."""
    model = experiment.model
    config = model.config if isinstance(model, Architecture) else getattr(model, "__dict__", {})
    vocabulary = config.get("vocab_size")
    if experiment.task != "causal-lm" or vocabulary is None:
        return ""
    numbers = experiment.batch_size * experiment.seq_len * vocabulary
    itemsize = 2 if experiment.dtype in SHORT else 8 if experiment.dtype == "float64" else 4
    return f"{format_size(numbers * itemsize)} of "


class Explained(Answer):
    """The difference of two peaks; ``difference`` has every level."""

    _short: ClassVar = ("component", "a_bytes", "b_bytes", "difference_bytes")

    def __init__(self, a: Result, b: Result) -> None:
        self.difference = explain_difference(a, b)
        sides = ((self.difference.a, a), (self.difference.b, b))
        self._advice = [
            f"{side.name}: {_size_logits(result.experiment)}{KEPT_LOGITS}."
            for side, result in sides
            if result.experiment.keep_logits
        ]
        self._advice += [
            f"{side.name}: {LOOPS[result.experiment.loop].source}."
            for side, result in sides
            if a.experiment.loop != b.experiment.loop
        ]

    @property
    def sentence(self) -> str:
        """What explains most of the difference."""
        return say(self.difference)

    def __str__(self) -> str:
        return self.text()

    def text(self, depth: str = "layer", top: int = 5, *, every_layer: bool = False) -> str:
        """Return what ``dpprof explain`` prints with the options of these names."""
        text = render_text(self.difference, Detail(depth, top, every_layer))
        return "\n".join([text, *self._advice])

    def table(self) -> DataFrame:
        """Return the bytes of both peaks by component; the differences leave 0 bytes."""
        bars = [
            (bar.name, bar.a_bytes, bar.b_bytes, bar.difference_bytes)
            for bar in self.difference.bars
        ]
        return tabulate(bars, self._short)

    def plot(self) -> Figure:
        """Draw the waterfall from B's peak to A's, and both timelines.

        Raises:
            InputError: Matplotlib is not installed.
        """
        return load_figure("waterfall", "plot")(self.difference, self.sentence)

    def to_json(self) -> str:
        """Return every level, and both timelines."""
        return json.dumps(self.difference.as_json(), indent=1)


def explain(a: Peak, b: Peak | None = None, *, loop: str | None = None) -> Explained:
    """Explain why the peak of A is higher than that of B, or lower.

    Args:
        a: A result of an instrument that records or predicts memory: itself, its file, or what
            ``estimate`` or ``capacity`` returned.
        b: Another one. The two may differ in anything.
        loop: In place of B, a training loop: A's experiment is predicted in it.

    Raises:
        InputError: They are the same file, or no such results; the message names the file. Or there
            is neither B nor a loop, or both, or no such loop.
        OSError: A file cannot be read.
        PredictionError: Nothing could be predicted; the message says why.

    Example:
        >>> import dpprof
        >>> asked = {"batch_size": 4, "seq_len": 64, "target": "h100"}
        >>> told = dpprof.explain(
        ...     dpprof.estimate("small", "opacus-hooks", **asked),
        ...     dpprof.estimate("small", "flash-bk", **asked),
        ... )
        >>> told.table()["component"].iloc[0]
        'per_sample_gradients'
    """
    files = [Path(peak) for peak in (a, b) if isinstance(peak, str | Path)]
    if len(files) > 1 and all(peak.exists() for peak in files) and files[0].samefile(files[1]):
        raise InputError(f"{files[1]}: A and B are the same file; name two results")
    if (b is None) == (loop is None):
        raise InputError(f"B: give another result, or {spell('loop')}, and not both")
    result = _read(a)
    return Explained(result, _predict_in(result, str(loop)) if b is None else _read(b))


def _predict_in(result: Result, loop: str) -> Result:
    fields = result.experiment.model_dump(mode="json") | {"loop": loop}
    fields |= dict.fromkeys(("loss", "loss_dtype", "keep_logits", "use_cache"))
    if result.capacity is not None:  # memory is of the batch that it states
        fields["batch_size"] = result.capacity.stated_batch_size
    asked = make_experiment(fields)
    file = result_path(Path(), "estimate", asked.id, 0)
    check_writable(file)
    predicted = predict(asked, "estimate", file, keep=True)
    if predicted.outcome != "ok":
        raise PredictionError(predicted)
    return predicted


def _read(peak: Peak) -> Result:
    """Return a result; of a file only one that records what was live at the peak."""
    if isinstance(peak, Predicted | Result):
        return peak.result if isinstance(peak, Predicted) else peak
    if not isinstance(peak, str | Path):
        raise InputError(
            f"{peak!r} is no result: give a file, or what estimate or capacity returned"
        )
    file = Path(peak)
    if not file.exists():
        raise InputError(f"{file}: there is no such file; name the JSON file of a result")
    try:
        result = read_result(file)
        list_holdings(result)
    except ResultError as error:  # its own message says to delete the file, whatever it is
        raise InputError(f"{file}: {error.problem}") from None
    except InputError as error:
        raise InputError(f"{file}: {error}") from None
    return result


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = common.Parser(
        "explain",
        __doc__,
        example="results/memory/A.r0.json results/memory/B.r0.json --depth operator --top 3",
    )
    parser.add_argument("a", type=common.path, metavar="A.json", help="the result to explain")
    parser.add_argument(
        "b", type=common.path, nargs="?", metavar="B.json", help="the result to compare it with"
    )
    parser.add_argument(
        "--loop",
        metavar="VALUE",
        help="in place of B: A's experiment, predicted in this training loop: " + ", ".join(LOOPS),
    )
    parser.add_argument(
        "--format",
        choices=("text", "json"),
        default="text",
        help="what is printed; json has every level and the timelines (default: text)",
    )
    parser.add_argument(
        "--depth",
        choices=list(LEVELS),
        default="layer",
        help="the innermost level that is printed (default: layer)",
    )
    parser.add_argument(
        "--top",
        type=common.positive,
        default=5,
        metavar="N",
        help="print this many layers of a component, and operators of a layer, one by one, and "
        "the others together (default: 5)",
    )
    parser.add_argument(
        "--every-layer",
        action="store_true",
        help="print the same layer of every block one by one, not together",
    )
    parser.add_argument(
        "--output",
        **common.DRAWING,
        help="also draw the waterfall and both timelines: a .png, .pdf or .svg",
    )
    arguments = parser.parse_args(argv)
    with common.ending_in_a_sentence("nothing was explained"):
        if arguments.output is not None:
            load_figure("waterfall", spell("output"))
            check_writable(arguments.output)
        explained = explain(arguments.a, arguments.b, loop=arguments.loop)
        if arguments.output is not None:
            common.save_figure(explained.plot(), arguments.output)
    if arguments.format == "json":
        text = explained.to_json()
    else:
        text = explained.text(arguments.depth, arguments.top, every_layer=arguments.every_layer)
    print(printable(text))
