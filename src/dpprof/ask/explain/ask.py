"""Why one run needs more memory than another: by component, layer and operator."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from dpprof.ask.answer import Answer, load_figure, tabulate
from dpprof.ask.estimate.ask import Predicted
from dpprof.ask.explain.show import Detail, render_text, say
from dpprof.experiments.config.architecture import Architecture
from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.validation import InputError
from dpprof.experiments.records.record import ResultError
from dpprof.experiments.records.result import Result, read_result
from dpprof.private.number_formats import KEPT_LOGITS, SHORT
from dpprof.results.analysis.difference.difference import explain_difference
from dpprof.results.analysis.difference.waterfall import format_size, list_holdings

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

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

    def table(self) -> "pd.DataFrame":
        """Return the bytes of both peaks by component; the differences leave 0 bytes."""
        bars = [
            (bar.name, bar.a_bytes, bar.b_bytes, bar.difference_bytes)
            for bar in self.difference.bars
        ]
        return tabulate(bars, self._short)

    def plot(self) -> "Figure":
        """Draw the waterfall from B's peak to A's, and both timelines.

        Raises:
            InputError: Matplotlib is not installed.
        """
        return load_figure("waterfall", "plot")(self.difference, self.sentence)

    def to_json(self) -> str:
        """Return every level, and both timelines."""
        return json.dumps(self.difference.as_json(), indent=1)


def explain(a: Peak, b: Peak) -> Explained:
    """Explain why the peak of A is higher than that of B, or lower.

    Args:
        a: A result of an instrument that records or predicts memory: itself, its file, or what
            ``estimate`` or ``capacity`` returned.
        b: Another one. The two may differ in anything.

    Raises:
        InputError: They are the same file, or no such results; the message names the file.
        OSError: A file cannot be read.

    Example:
        >>> import dpprof
        >>> asked = {"batch_size": 4, "seq_len": 64, "target": "h100"}
        >>> told = dpprof.explain(
        ...     dpprof.estimate("tiny", "opacus-hooks", **asked),
        ...     dpprof.estimate("tiny", "flash-bk", **asked),
        ... )
        >>> told.table()["component"].iloc[0]
        'per_sample_gradients'
    """
    files = [Path(peak) for peak in (a, b) if isinstance(peak, str | Path)]
    if len(files) > 1 and all(peak.exists() for peak in files) and files[0].samefile(files[1]):
        raise InputError(f"{files[1]}: A and B are the same file; name two results")
    return Explained(_find(a), _find(b))


def _find(peak: Peak) -> Result:
    if isinstance(peak, str | Path):
        return read(Path(peak))
    result = peak.result if isinstance(peak, Predicted) else peak
    if not isinstance(result, Result):
        raise InputError(
            f"{result!r} is no result: give a file, or what estimate or capacity returned"
        )
    return result


def read(file: Path) -> Result:
    """Read a result, and check that it records what was live at the peak.

    Raises:
        InputError: It is no such result; the message names the file.
        OSError: The file cannot be read.
    """
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
