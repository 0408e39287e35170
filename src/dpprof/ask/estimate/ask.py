"""The memory, FLOPs and time of one experiment, predicted without running it."""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from dpprof.ask.answer import Answer, load_figure, tabulate
from dpprof.ask.estimate.show import format_estimate
from dpprof.ask.predictions import PredictionError, predict
from dpprof.ask.questions import make_experiment, naming
from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.launch.progress import tell_result
from dpprof.experiments.records.result import Result, result_path
from dpprof.system.files import check_writable

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.figure import Figure

INSTRUMENT = "estimate"


class Predicted(Answer):
    """One prediction; ``result`` has every figure (docs/numbers/README.md)."""

    _short: ClassVar = ("component", "bytes", "share")

    def __init__(self, result: Result) -> None:
        self.result = result

    @property
    def sentence(self) -> str:
        """The experiment, its peak, and its time where that is predicted."""
        head, peak, *others = str(self).splitlines()
        time = [line for line in others if line.startswith("time")]
        return "; ".join([head, *(" ".join(line.split()) for line in (peak, *time))])

    def __str__(self) -> str:
        return format_estimate(self.result)

    def table(self) -> "pd.DataFrame":
        """Return what holds the memory at the peak: component, bytes and share."""
        memory = self.result.memory
        assert memory is not None
        assert memory.at_peak is not None
        held = memory.at_peak.components.items()
        rows = sorted(((name, size) for name, size in held if size), key=lambda row: -row[1])
        frame = tabulate(rows, ("component", "bytes"))
        return frame.assign(share=frame["bytes"] / frame["bytes"].sum())

    def plot(self) -> "Figure":
        """Draw the memory of a step by what holds it."""
        return load_figure("step_memory", "plot")(self.result)

    def to_json(self) -> str:
        """Return the result, as its file has it."""
        return self.result.model_dump_json(indent=1)


def estimate(
    model: str | dict[str, Any] | Callable[[Experiment], Any],
    method: str,
    *,
    output: str | Path | None = None,
    **experiment: Any,
) -> Predicted:
    """Predict the memory, FLOPs and time of an experiment, without running it.

    Args:
        model: A name or a mapping as of ``dpprof estimate``; or ``package.module:function``, or a
            function, that builds the model (docs/how-to/answers-from-python.md).
        method: How the gradient is computed.
        output: The result's file; ``results/estimate/ID.r0.json`` where it is not given. Of a
            model that a function of this process builds there is none.
        **experiment: Every other option of ``dpprof estimate``, with underscores.

    Raises:
        InputError: A value is not allowed, or a required one is missing.
        PredictionError: Nothing could be predicted; the message says why.

    Example:
        >>> import dpprof
        >>> told = dpprof.estimate("tiny", "flash-bk", batch_size=4, seq_len=64, target="h100")
        >>> told.result.memory.at_peak.phase
        'backward'
    """
    with naming({"model": model, "method": method, **experiment}) as fields:
        asked = make_experiment(fields)
        file = Path(output or result_path(Path(), INSTRUMENT, asked.id, 0))
        check_writable(file)
        result = predict(asked, INSTRUMENT, file, keep=True)
    tell_result(result)
    if result.outcome != "ok":
        raise PredictionError(result)
    return Predicted(result)
