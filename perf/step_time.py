"""Predicted times of whole training steps on GPUs beside what others published.

    export PYTHONPATH=src:tests
    python perf/step_time.py --output perf/step_time.md --figure perf/step_time.png

The steps and their sources are in published_steps.yaml. Their errors showed where to look for
causes; no figure of the model is fitted to them, and each has a source of its own. A step is one
batch forward and backward on one GPU, with its part of an update: GPUs that share the optimizer's
states update a part each, and one update serves all batches that were added up. What GPUs send each
other, clipping of the gradient and loading of data are left out, so predictions are for the best
that a GPU does. Operators are those of PyTorch's eager mode: steps that were compiled are told
apart, and count in no median but their own.
"""

from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

from dpprof.experiments.records.result import PredictedTime
from dpprof.system.console import say
from published_points import Point, draw, summarise
from published_steps import Row, predict, read_rows
from script import make_parser, publish

_COLUMNS = (
    *("model", "dtype", "T", "B", "published (ms)", "predicted (ms)", "90 % interval"),
    *("waits", "error"),
)
_NOTE = """\
An asterisk marks an interval that what was published lies outside of. A step waits while its device
has nothing to do, because the host has not issued the next operator."""


class Compared(NamedTuple):
    """A published step, and what was predicted for it."""

    row: Row
    predicted: PredictedTime

    @property
    def point(self) -> Point:
        """The two times."""
        step, row = self.predicted, self.row
        return Point(
            *(row.source.name, row.published_s),
            *(step.median, step.low, step.high),
            is_compiled=row.compiled,
        )


def compare(rows: Iterable[Row]) -> list[Compared]:
    """Predict every row."""
    compared = []
    for row in rows:
        compared.append(Compared(row, predict(row)))
        say(f"{row.source.name}, {row.label}, T {row.seq_len}: {compared[-1].point.error:+.1%}")
    return compared


def tabulate(compared: Sequence[Compared]) -> str:
    """Lay out the medians, and the steps of each source."""
    lines = [*_summarise(compared)]
    for source, group in groupby(compared, key=lambda one: one.row.source):
        lines += [
            "",
            f"## {source.name}",
            "",
            f"[Source]({source.url}). {source.gpu}. {source.differs}.",
            "",
            f"| {' | '.join(_COLUMNS)} |",
            f"| --- | --- |{' ---: |' * (len(_COLUMNS) - 2)}",
            *map(_lay_out, group),
        ]
    return "\n".join(lines)


def _lay_out(one: Compared) -> str:
    row, step = one.row, one.predicted
    outside = "" if one.point.is_inside else " *"
    cells = [
        row.label,
        row.dtype,
        f"{row.seq_len:,}",
        f"{row.batch_size}",
        f"{row.published_s * 1e3:,.0f}",
        f"{step.median * 1e3:,.0f}",
        f"{step.low * 1e3:,.0f} to {step.high * 1e3:,.0f}{outside}",
        f"{step.waiting_share:.0%}",
        f"{one.point.error:+.1%}",
    ]
    return f"| {' | '.join(cells)} |"


def _summarise(compared: Sequence[Compared]) -> list[str]:
    eager = [one for one in compared if not one.row.compiled]
    names = dict.fromkeys(one.row.source.name for one in eager)
    groups = {name: [one for one in eager if one.row.source.name == name] for name in names}
    groups["all eager steps"] = eager
    compiled = [one for one in compared if one.row.compiled]
    if compiled:
        groups["compiled, predicted as eager"] = compiled
    points = {name: [one.point for one in group] for name, group in groups.items()}
    return [*summarise(points), "", _NOTE]


def main() -> None:
    """Run from the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("--figure", type=Path, help="a file for the figure")
    arguments = parser.parse_args()
    compared = compare(read_rows())
    table = tabulate(compared)
    picture = f"\n![{draw.__doc__}]({arguments.figure.name})\n" if arguments.figure else ""
    publish(f"{__doc__}{picture}", table, arguments.output)
    if arguments.figure:
        draw([one.point for one in compared]).savefig(arguments.figure)


if __name__ == "__main__":
    main()
