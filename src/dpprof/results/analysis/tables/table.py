"""What a table and its columns are, and the two files that list them."""

import csv
import io
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from pydantic import BaseModel

from dpprof.experiments.config.experiment import Experiment
from dpprof.results.analysis.tables.axes import AXES

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

    kind: Literal["text", "integer", "number", "boolean"]
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


def declare(model: type[BaseModel], names: str | None = None) -> list[Column]:
    """Declare columns for fields of a model, all or some, with the fields' descriptions."""
    schemas = model.model_json_schema()["properties"]
    columns = []
    for name in schemas if names is None else names.split():
        types = {schema.get("type") for schema in schemas[name].get("anyOf", [schemas[name]])}
        make = next((make for make in (integer, number, boolean) if make.args[0] in types), text)
        columns.append(make(name, schemas[name]["description"]))
    return columns


def list_columns(tables: Mapping[str, Table]) -> str:
    """Return docs/numbers/data/columns.csv, which lists the columns of every table."""
    axes = declare(Experiment, " ".join(AXES))
    file = io.StringIO()
    lines = csv.writer(file, lineterminator="\n")
    lines.writerow(["table", "column", "type", "unit", "what it is"])
    for name, table in tables.items():
        for column in table.columns.values():
            what = f"axis: {column.description}" if column in axes else column.description
            lines.writerow([name, column.name, column.kind, column.unit, what])
    return file.getvalue()


_PAGE = """\
# The columns of the tables

[columns.csv](data/columns.csv) says of each column of `results/tables/*.csv` its type, its unit and
what it is. `make schemas` writes it and this page from
`src/dpprof/results/analysis/tables/columns.py`.

An empty cell is an unknown value. Axes are
[keys of an experiment](../../config/README.md#keys-of-an-experiment), all but the two on waiting.

No spreadsheet runs a text of these tables. One that begins with `=`, `+`, `-`, `@`, a tab or a
carriage return, with or without apostrophes before it, has one more apostrophe in front. Numbers
have none: -0.5. CSV files that `report.html` saves are written so too.

A row of each table is:

"""


def write_page(tables: Mapping[str, Table]) -> str:
    """Return docs/numbers/tables.md, which says what a row of every table is."""
    return _PAGE + "".join(f"* `{name}.csv`: {table.row}\n" for name, table in tables.items())
