"""Numbers of private training that others published, beside what is predicted for each."""

import math
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from dpprof.system.console import say
from evidence import NOT_RECREATED, SOURCES, Row, find_target
from predictions import predict_private
from script import lay_out

_MIB = 2**20
_WHOLE_FROM = 100
"""Numbers from here on are shown without digits after the point."""


KINDS = {
    "peak memory": "peak (MiB)",
    "largest batch": "largest batch",
    "throughput": "ms a sample",
    "step time": "ms a sample",
}
"""How quantities of private runs are told."""


class Number(NamedTuple):
    """A number of a private run, and what was predicted for it."""

    row: Row
    predicted: float
    reference: "Number | None" = None
    """The row that ratios divide by; None for such a row, and where there is none."""

    @property
    def is_time(self) -> bool:
        """Whether it is a time."""
        return KINDS[self.row.quantity] == "ms a sample"

    @property
    def published(self) -> float | None:
        """The number, with times as milliseconds of a sample."""
        if self.row.value is None or not self.is_time:
            return self.row.value
        if self.row.quantity == "throughput":
            return 1e3 / self.row.value
        return 1e3 * self.row.value / int(self.row.settings["batch_size"])

    @property
    def error(self) -> float | None:
        """Predicted over published, less 1; None where memory ran out."""
        return None if self.published is None else self.predicted / self.published - 1

    @property
    def ratios(self) -> tuple[float, float] | None:
        """The published and the predicted ratio to the reference."""
        base = self.reference
        if base is None or self.published is None or not base.published:
            return None
        return self.published / base.published, self.predicted / base.predicted

    @property
    def ratio_error(self) -> float | None:
        """The predicted ratio over the published one, less 1."""
        return None if self.ratios is None else self.ratios[1] / self.ratios[0] - 1

    @property
    def fits(self) -> bool:
        """Whether what is predicted is within the GPU's memory."""
        if self.is_time:
            return self.predicted < math.inf
        return self.predicted * _MIB <= find_target(self.row.target).memory_bytes

    @property
    def cells(self) -> list[str]:
        """The row of the table."""
        row, settings = self.row, self.row.settings
        published, error = _round(self.published), _percent(self.error)
        if row.value is None:
            published, error = "out of memory", "fits" if self.fits else "does not fit"
        batch = f"{settings['batch_size']:,}" if "batch_size" in settings else ""
        ratios = map(_round, self.ratios or (None, None))
        return [
            *(row.model, row.method, str(settings["size"]), batch, KINDS[row.quantity]),
            *(published, _round(self.predicted), error, *ratios, _percent(self.ratio_error)),
        ]


def _round(number: float | None) -> str:
    if number is None or number == math.inf:
        return ""
    return f"{number:.3g}" if number < _WHOLE_FROM else f"{number:,.0f}"


def _percent(number: float | None) -> str:
    return "" if number is None else f"{number:+.1%}"


def compare(rows: Iterable[Row], predict: Callable[[Row], float] = predict_private) -> list[Number]:
    """Predict every row that can be re-created, and find the row that its ratios divide by."""
    numbers: list[Number] = []
    references: dict[tuple[Any, ...], Number] = {}
    for row in rows:
        if row.not_predicted:
            continue
        number = Number(row, predict(row))
        settings = row.settings
        batch = settings["batch_size"] if row.quantity == "peak memory" else None
        # Both units of a time are other runs.
        key = row.group, row.model, row.quantity, settings["size"], batch, settings["steps"]
        reference = references.get(key)
        if reference is None and number.published is not None:
            references[key] = number
        elif reference is not None and reference.row.method != row.method:
            number = number._replace(reference=reference)
        numbers.append(number)
        if number.error is not None:
            say(f"{row.id}: {number.error:+.1%}")
    return numbers


def tabulate(rows: Sequence[Row], numbers: Sequence[Number]) -> str:
    """Lay out medians, what is left out, and every row."""
    groups = {
        source: [number for number in numbers if number.row.source is source]
        for source in SOURCES.values()
    }
    groups = {source: group for source, group in groups.items() if group}
    left_out = []
    for why, text in NOT_RECREATED.items():
        parts = [row.group for row in rows if row.not_predicted == why]
        left_out.append((", ".join(dict.fromkeys(parts)), len(parts), text))
    lines = [
        f"Of {len(rows)} published numbers {len(numbers)} are re-created.",
        *("", "Medians of absolute errors, and of how many rows:", "", *_summarise(groups)),
        *("", *lay_out(("not re-created", "rows:", "why"), left_out)),
    ]
    heads = ["model", "method", "pixels or T:", "B:", "number", "published:", "predicted:"]
    heads += ["error:", "ratio published:", "ratio predicted:", "error:"]
    for group in groups.values():
        lines += group[0].row.introduction + lay_out(heads, [number.cells for number in group])
    return "\n".join(lines)


def _summarise(groups: Mapping[Any, Sequence[Number]]) -> list[str]:
    complete = [number for source, group in groups.items() if source.complete for number in group]
    named = {source.name: group for source, group in groups.items()}
    kinds = list(dict.fromkeys(KINDS.values()))
    rows = []
    for name, group in {**named, "all that state what is needed": complete}.items():
        cells = [name]
        for kind in kinds:
            numbers = [number for number in group if KINDS[number.row.quantity] == kind]
            cells += [
                _find_median(number.error for number in numbers),
                _find_median(number.ratio_error for number in numbers),
            ]
        rows.append(cells)
    return lay_out(["source", *(f"{kind}{of}:" for kind in kinds for of in ("", ", ratio"))], rows)


def _find_median(errors: Iterable[float | None]) -> str:
    sizes = [abs(error) for error in errors if error is not None]
    return f"{statistics.median(sizes):.1%} of {len(sizes)}" if sizes else ""
