"""Where metrics are written: Weights & Biases, or any callable."""

from collections.abc import Callable, Mapping
from typing import Any

Sink = Callable[[int, Mapping[str, float]], None]
"""Called with a step's number and its values by name. The monitor calls its ``close``, if any."""


class WeightsAndBiases:
    """Logs the values of each step to a new run at Weights & Biases.

    For a run that exists already, a callable is enough:
    ``lambda step, values: run.log(values, step=step)``.

    Args:
        **init: Arguments of ``wandb.init``: ``project``, ``mode="offline"``, ``dir`` and others.

    Raises:
        ImportError: wandb is not installed.
    """

    def __init__(self, **init: Any) -> None:
        try:
            import wandb  # noqa: PLC0415 (an extra)
        except ImportError as error:
            raise ImportError("wandb is not installed; pip install 'dpprof[wandb]'") from error
        self._run = wandb.init(**init)

    def __call__(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Finish the run."""
        self._run.finish()
