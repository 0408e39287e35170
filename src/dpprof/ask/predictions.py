"""One prediction, in a process of its own, or here where only this process can build the model."""

import tempfile
from pathlib import Path
from typing import Any

from dpprof.experiments.config import registry
from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.launch.supervisor import supervise
from dpprof.experiments.records.result import Result


class PredictionError(RuntimeError):
    """Nothing could be predicted; the message says why, ``result`` has everything."""

    def __init__(self, result: Result) -> None:
        why = result.error.message if result.error else result.outcome
        experiment = result.experiment
        super().__init__(f"{experiment.method} on {experiment.model_name}: {why}")
        self.result = result


def predict(experiment: Experiment, instrument: str, output: Path, **how: Any) -> Result:
    """Predict an experiment, and keep its result in a file.

    A model that a function of this process builds is predicted here, and its result is not kept:
    another function may have its name tomorrow.

    Args:
        experiment: What to predict.
        instrument: ``estimate`` or ``capacity``.
        output: The result's file.
        **how: Other arguments of ``supervise``, such as ``log_path``.
    """
    if not registry.is_lent(experiment.model):
        return supervise(experiment, instrument, 0, output, **how)
    with tempfile.TemporaryDirectory() as folder:
        return supervise(experiment, instrument, 0, Path(folder, "result.json"))
