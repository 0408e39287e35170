"""What a table and a column are, and the columns of an experiment's axes."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from dpprof.analysis.axes import AXES
from dpprof.spec.experiment import Experiment

Kind = Literal["text", "integer", "number", "boolean"]

_UNITS = {
    "flops_per_s": "FLOP/s",
    "bytes_per_s": "B/s",
    "per_s": "1/s",
    "joules_per_step": "J",
    "bytes": "B",
    "gpu_hours": "h",
    "seconds": "s",
    "s": "s",
    "flops": "FLOP",
}


@dataclass(frozen=True)
class Column:
    """A column; an empty cell is an unknown value."""

    kind: Kind
    name: str
    description: str

    @property
    def unit(self) -> str:
        """The unit, which the name ends in; empty for a count, a share and a text."""
        ends = (unit for end, unit in _UNITS.items() if f"_{self.name}".endswith(f"_{end}"))
        return next(ends, "") if self.kind in ("integer", "number") else ""


class Table:
    """A table: what a row is, and its columns in order."""

    def __init__(self, row: str, *columns: Column) -> None:
        self.row, self.columns = row, {column.name: column for column in columns}


text, integer, number, boolean = (
    partial(Column, kind) for kind in ("text", "integer", "number", "boolean")
)


def declare_axes(names: Iterable[str]) -> list[Column]:
    """Declare axes of experiments, with the descriptions of the config's keys."""
    schemas = Experiment.model_json_schema()["properties"]
    columns = []
    for name in names:
        kinds = {one.get("type") for one in schemas[name].get("anyOf", [schemas[name]])}
        kind = next((make for make in (integer, number) if make.args[0] in kinds), text)
        columns.append(kind(name, schemas[name]["description"]))
    return columns


_PAGE = """\
# The columns of the tables

What each column of `results/tables/*.csv` is. `make schemas` writes this page from
`src/dpprof/analysis/table_columns.py`.

An empty cell is an unknown value. Axes are
[keys of an experiment](../../config/README.md#keys-of-an-experiment), all but the two on waiting.

No spreadsheet runs a text of these tables. One that begins with `=`, `+`, `-`, `@`, a tab or a
carriage return, with or without apostrophes before it, has one more apostrophe in front. Numbers
have none: -0.5. CSV files that `report.html` saves are written so too.
"""


def write_page(tables: Mapping[str, Table]) -> str:
    """Return docs/numbers/tables.md, which lists the columns of every table."""
    axes = declare_axes(AXES)
    lines = [_PAGE]
    for name, table in tables.items():
        lines += [f"## `{name}.csv`\n", f"A row is {table.row}.\n"]
        lines += ["| column | type | unit | what it is |", "| --- | --- | --- | --- |"]
        shared = [column for column in table.columns.values() if column in axes]
        for column in table.columns.values():
            if column not in axes:
                cells = f"`{column.name}` | {column.kind} | {column.unit}"
                lines.append(f"| {cells} | {column.description} |".replace("|  |", "| |"))
            elif column is shared[0]:
                rest = ", ".join(one.name for one in axes if one not in shared)
                what = f"axes without {rest}" if rest else "axes"
                lines.append(f"| `{column.name}` ... `{shared[-1].name}` | | | {what} |")
        lines.append("")
    return "\n".join(lines)
