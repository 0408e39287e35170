"""What the sweep of trainings that learn may say, and the cells that it plans.

A cell is one setting of one task: one process trains it with every seed, and leaves one JSON file.
"""

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, field_validator

from dpprof.experiments.config.config_files import read_config_file
from dpprof.experiments.config.validation import InputError, explain
from dpprof.experiments.records.record import Part

Task = Literal["digits", "characters", "adapters"]
Library = Literal["dpprof", "opacus", "torch"]
"""torch trains without privacy, and without per-sample gradients."""

Positive = Annotated[float, Field(gt=0)]
Count = Annotated[int, Field(ge=1, le=10**6)]
Seeds = Annotated[int, Field(ge=2, le=100)]
"""One seed has no interval."""

BANDS = 8


class Settings(Part):
    """How a task is trained; batches are Poisson batches of this mean size."""

    batch_size: Count
    steps: Count
    learning_rate: Positive
    max_grad_norm: Positive
    delta: Annotated[float, Field(gt=0, lt=1)]
    noise: Literal["independent", "banded"] = "independent"
    trained: Literal["adapters", "all"] = "adapters"
    """What is trained of a model that has adapters."""


class Cell(Part):
    """One setting of one task, trained with every seed by one process."""

    task: Task
    library: Library
    epsilon: Positive | None
    """None: without noise, and with a bound that no gradient reaches."""

    settings: Settings
    seeds: Count
    change: str | None = None
    """What differs from the task's settings; None: nothing."""

    @property
    def name(self) -> str:
        """What its files are called."""
        budget = "none" if self.epsilon is None else f"{self.epsilon:g}"
        return "-".join([self.task, self.library, budget, *filter(None, [self.change])])


class Run(Part):
    """A training with one seed."""

    seed: int
    before: float
    """The held-out metric of the model that the training begins with."""

    held_out: float
    cpu_s: float
    """CPU seconds of the steps, without imports, data and measuring."""


class CellResult(Part):
    """What the process of a cell measured."""

    cell: Cell
    metric: str
    samples: int
    sample_rate: float
    noise_multiplier: float
    parameters: int
    """How many are trained."""

    runs: list[Run]
    place: str


class Changes(Part):
    """Settings that are tried one at a time, with dpprof, at one epsilon."""

    epsilon: Positive
    seeds: Seeds
    settings: dict[
        Literal["batch_size", "learning_rate", "max_grad_norm", "noise", "trained"],
        list[Positive | Literal["banded", "all"]],
    ]
    """Numbers multiply what the task has."""


class Sweep(Part):
    """What ``config/learning.yaml`` may say."""

    epsilons: list[Positive | None]
    libraries: list[Literal["dpprof", "opacus"]]
    seeds: Seeds
    tasks: dict[Task, Settings]
    changes: Changes

    @field_validator("epsilons", mode="before")
    @classmethod
    def _read_none(cls, epsilons: Any) -> Any:
        is_list = isinstance(epsilons, list)
        return [None if e == "none" else e for e in epsilons] if is_list else epsilons

    def plan(self) -> list[Cell]:
        """Return all cells: every task with every library and epsilon, then the changes."""
        cells = [
            Cell(task=task, library=library, epsilon=epsilon, settings=own, seeds=self.seeds)
            for (task, own), epsilon, library in product(
                self.tasks.items(), self.epsilons, self.libraries
            )
        ]
        if None in self.epsilons:
            plain = [cell for cell in cells if cell.epsilon is None and cell.library == "dpprof"]
            cells += [cell.model_copy(update={"library": "torch"}) for cell in plain]
        return cells + [
            cell for task, own in self.tasks.items() for cell in self._change(task, own)
        ]

    def _change(self, task: Task, own: Settings) -> Iterator[Cell]:
        for key, values in self.changes.settings.items():
            for value in values if key != "trained" or task == "adapters" else []:
                before = getattr(own, key)
                told = value if isinstance(value, str) else type(before)(before * value)
                yield Cell(
                    task=task,
                    library="dpprof",
                    epsilon=self.changes.epsilon,
                    settings=Settings.model_validate(own.model_dump() | {key: told}),
                    seeds=self.changes.seeds,
                    change=f"{key}-{told:g}" if isinstance(told, float) else f"{key}-{told}",
                )


def read_sweep(path: Path) -> Sweep:
    """Read a sweep of trainings that learn.

    Raises:
        InputError: The file is no such sweep; the message names key, value, and what is allowed.
    """
    try:
        return Sweep.model_validate(read_config_file(path))
    except ValidationError as error:
        raise InputError(f"{path}: {explain(error, Sweep)}") from None
