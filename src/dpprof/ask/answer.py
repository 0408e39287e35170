"""What every answer has: a text, a table, JSON, and a short view in a notebook."""

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from html import escape
from typing import TYPE_CHECKING, Any, ClassVar

from dpprof.experiments.config.validation import InputError

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib import figure

    DataFrame = pd.DataFrame
    Figure = figure.Figure
else:
    DataFrame = Figure = Any  # answers import pandas and matplotlib where they are asked for them


class Answer(ABC):
    """An answer: ``str`` is what the command prints, and some have a figure, by ``plot``."""

    _short: ClassVar[tuple[str, ...]]  # the columns of the short view

    @property
    @abstractmethod
    def sentence(self) -> str:
        """The answer in a sentence or two."""

    @abstractmethod
    def __str__(self) -> str: ...

    @abstractmethod
    def table(self) -> DataFrame:
        """Return the numbers as a table, in bytes and seconds."""

    @abstractmethod
    def to_json(self) -> str:
        """Return all of it, as the command writes it."""

    def __repr__(self) -> str:
        return str(self)

    def _repr_html_(self) -> str:
        """Return the sentence, and the columns of the table that say most."""
        table = self.table()
        short = table[[name for name in self._short if table[name].notna().any()]]
        rows = short.map(_format).to_html(index=False, border=0)
        return f"<p>{escape(self.sentence)}</p>\n{rows}"


class BatchAnswer(Answer):
    """An answer about batches of several methods or models."""

    @property
    @abstractmethod
    def fits(self) -> bool:
        """Whether any safely fits."""

    @property
    @abstractmethod
    def details(self) -> str:
        """What a screen has no room for: reasons, and what each number rests on."""


def _format(value: Any) -> str:
    """Return a cell as text: whole numbers and large ones without decimals."""
    if value is None or value != value:  # noqa: PLR0124 (what is not a number)
        return ""
    if isinstance(value, int | float):
        return f"{value:,.0f}" if value == round(value) or abs(value) >= _LARGE else f"{value:.3g}"
    return str(value)


_LARGE = 100


def tabulate(rows: Iterable[Any], columns: tuple[str, ...] | None = None) -> DataFrame:
    """Return rows as a table."""
    import pandas as pd  # noqa: PLC0415 (slow to import)

    return pd.DataFrame(rows, columns=columns)


def load_figure(name: str, key: str) -> Callable[..., Figure]:
    """Return what draws a figure: ``draw`` of a module, or ``module:function``.

    Raises:
        InputError: Matplotlib is not installed; ``key`` asked for the figure.
    """
    module, _, function = name.partition(":")
    try:
        figures = importlib.import_module(f"dpprof.results.figures.{module}")
    except ModuleNotFoundError as error:
        why = f"{error.name} is not installed; pip install 'dpprof[report]'"
        raise InputError(f"{key}: {why}") from None
    draw: Callable[..., Figure] = getattr(figures, function or "draw")
    return draw
