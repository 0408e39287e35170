"""Writes the pages that put predictions beside the rows of evidence.csv.

    export PYTHONPATH=src:tests
    python perf/validate.py step_time --output perf/step_time.md --figure perf/step_time.png
    python perf/validate.py ranks --output perf/ranks.md --figure perf/ranks.png
    python perf/validate.py private_runs --output perf/private_runs.md
    python perf/validate.py measured_steps --output perf/measured_steps.md

Private runs take about half an hour, and so do ranks.
"""

import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

import private_numbers
from dpprof.experiments.records.result import PredictedTime
from dpprof.results.figures.style import SERIES_COLOURS, new_figure
from dpprof.system.console import say
from evidence import DATA, PAGES, Row, read_rows
from predictions import describe_measured, predict_measured, predict_rank_step, predict_shared_step
from script import lay_out, make_parser, publish

_MARKERS = "osD^vPX*<>"
_MIB = 2**20
_WITHIN = 0.08
"""By how much a predicted scaling may differ, to be counted."""


class Step(NamedTuple):
    """The step of a row, and what was predicted for it."""

    row: Row
    predicted: PredictedTime

    @property
    def error(self) -> float:
        """The predicted median over the time of the row, less one."""
        return self.predicted.median / self.row.step_s - 1

    @property
    def is_inside(self) -> bool:
        """Whether the time of the row lies in the 90 % interval."""
        return self.predicted.low <= self.row.step_s <= self.predicted.high

    @property
    def cells(self) -> list[str]:
        """The time of the row, the predicted one and its interval, in milliseconds."""
        low, high = (f"{end * 1e3:,.0f}" for end in (self.predicted.low, self.predicted.high))
        return [
            f"{self.row.step_s * 1e3:,.0f}",
            f"{self.predicted.median * 1e3:,.0f}",
            f"{low} to {high}{'' if self.is_inside else ' *'}",
        ]


_TIMES = ("published (ms):", "predicted (ms):", "90 % interval:")
_ASTERISK = "An asterisk marks an interval that what was published lies outside of."


class Page(NamedTuple):
    """The text of a page, and the steps of its figure."""

    text: str
    steps: Sequence[Step] = ()


def predict_steps(rows: Iterable[Row], predict: Callable[[Row], PredictedTime]) -> list[Step]:
    """Predict every row that can be predicted."""
    steps = []
    for row in rows:
        if not row.not_predicted:
            steps.append(Step(row, predict(row)))
            say(f"{row.id}: {steps[-1].error:+.1%}")
    return steps


def summarise(steps: Sequence[Step], name: Callable[[Row], str], several: str = "") -> list[str]:
    """Lay out errors and intervals by group, which ``name`` names, and those of compiled steps.

    ``several`` is the name of the group of steps on more than one GPU, if it is told.
    """
    eager = [step for step in steps if not step.row.is_compiled]
    groups: dict[str, list[Step]] = defaultdict(list)
    for step in eager:
        groups[name(step.row)].append(step)
    groups["all eager steps"] = eager
    if several:
        groups[several] = [step for step in eager if step.row.settings["gpus"] > 1]
    groups["compiled, predicted as eager"] = [step for step in steps if step.row.is_compiled]
    rows = []
    for title, group in groups.items():
        errors = [step.error for step in group]
        inside = sum(step.is_inside for step in group)
        if group:
            median, off = statistics.median(errors), statistics.median(map(abs, errors))
            cells = (f"{median:+.1%}", f"{off:.1%}", f"{inside} of {len(group)}")
            rows.append((title, len(group), *cells))
    heads = ("source", "steps:", "median error:", "median absolute error:")
    return lay_out((*heads, "inside the 90 % interval:"), rows)


def draw(steps: Sequence[Step]) -> Figure:
    """Predicted over published seconds of a step, with 90 % intervals; open: compiled steps."""
    figure, axes = new_figure(row_inches=3.6)
    axis = axes[0, 0]
    looks = {
        name: (SERIES_COLOURS[at % len(SERIES_COLOURS)], _MARKERS[at % len(_MARKERS)])
        for at, name in enumerate(dict.fromkeys(step.row.source.name for step in steps))
    }
    for row, predicted in steps:
        colour, marker = looks[row.source.name]
        axis.errorbar(
            row.step_s,
            predicted.median,
            yerr=[[predicted.median - predicted.low], [predicted.high - predicted.median]],
            color=colour,
            marker=marker,
            markersize=4,
            markerfacecolor="white" if row.is_compiled else colour,
            elinewidth=0.6,
        )
    published = [step.row.step_s for step in steps]
    ends = [min(published) / 1.5, max(published) * 1.5]
    axis.plot(ends, ends, color="grey", linewidth=0.8, zorder=0)
    axis.set(xscale="log", yscale="log", xlabel="published step (s)", ylabel="predicted step (s)")
    axis.xaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_major_formatter("{x:g}")
    handles = [
        Line2D([], [], label=name, color=colour, marker=marker, linestyle="", markersize=4)
        for name, (colour, marker) in looks.items()
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=2)
    return figure


def step_time(rows: Sequence[Row]) -> Page:
    """Steps of one GPU."""
    steps = predict_steps(rows, predict_shared_step)
    return Page(tabulate_steps(steps), steps)


def tabulate_steps(steps: Sequence[Step]) -> str:
    """Lay out the medians, and the steps of each source."""
    lines = summarise(steps, lambda row: row.source.name)
    lines += ["", f"{_ASTERISK} A step waits while its device"]
    lines += ["has nothing to do, because the host has not issued the next operator."]
    for _, group in groupby(steps, key=lambda step: step.row.source):
        part = list(group)
        cells = [
            (
                *(step.row.settings["label"], step.row.settings.get("dtype", "bfloat16")),
                *(f"{step.row.settings['seq_len']:,}", step.row.settings["batch_size"]),
                *(*step.cells, f"{step.predicted.waiting_share:.0%}", f"{step.error:+.1%}"),
            )
            for step in part
        ]
        heads = ("model", "dtype", "T:", "B:", *_TIMES, "waits:", "error:")
        lines += [*part[0].row.introduction, *lay_out(heads, cells)]
    return "\n".join(lines)


def ranks(rows: Sequence[Row]) -> Page:
    """Steps on many GPUs: medians, scaling, and every row."""
    steps = predict_steps(rows, predict_rank_step)
    several = "all of more than one GPU"
    lines = summarise(steps, lambda row: f"{row.source.name}, {row.target}", several)
    lines += ["", "## Scaling", "", *_compare_scaling(steps), "", "## Rows", ""]
    lines += [
        f"{_ASTERISK} A step exchanges while its",
        "GPU waits for other ranks, and waits while the host has not issued anything. A batch is",
        "samples of a GPU times those that are added up.",
        "",
    ]
    heads = ("source", "GPU", "GPUs:", "model", "T:", "batch:", *_TIMES)
    lines += lay_out((*heads, "exchanges:", "waits:", "error:"), map(_lay_out_rank, steps))
    left_out = [(row.id, _link(row), row.not_predicted) for row in rows if row.not_predicted]
    lines += ["", "## Not predicted", "", *lay_out(("row", "source", "why"), left_out)]
    return Page("\n".join(lines), steps)


def _link(row: Row) -> str:
    return f"[{row.source.name}]({row.read_from})"


def _lay_out_rank(step: Step) -> list[str]:
    row, settings = step.row, step.row.settings
    training = f"{row.model}, {settings.get('sharding', 'none')}"
    training += ", LoRA" if "lora" in settings else ""
    training += ", checkpointed" if "checkpointing" in settings else ""
    training += ", compiled" if row.is_compiled else ""
    return [
        *(_link(row), row.target, str(settings["gpus"]), training, f"{settings['seq_len']:,}"),
        *(f"{settings['batch_size']} x {settings['accumulation']}", *step.cells),
        f"{step.predicted.communication_share or 0.0:.0%}",
        *(f"{step.predicted.waiting_share:.0%}", f"{step.error:+.1%}"),
    ]


def find_series(steps: Sequence[Step]) -> Iterator[tuple[Step, Step]]:
    """Yield the fewest and the most GPUs of what differs in the number of GPUs alone."""
    same = ("batch_size", "seq_len", "checkpointing", "compiled")
    groups: dict[tuple[Any, ...], list[Step]] = defaultdict(list)
    for step in steps:
        row = step.row
        settings = (row.settings.get(name) for name in same)
        groups[row.source.name, row.target, row.model, *settings].append(step)
    for group in groups.values():
        ordered = sorted(group, key=lambda step: int(step.row.settings["gpus"]))
        if ordered[0].row.settings["gpus"] < ordered[-1].row.settings["gpus"]:
            yield ordered[0], ordered[-1]


def _tokens_per_s(step: Step, seconds: float) -> float:
    """Return tokens a second of a GPU."""
    sizes = ("batch_size", "accumulation", "seq_len")
    return math.prod(int(step.row.settings[name]) for name in sizes) / seconds


def _compare_scaling(steps: Sequence[Step]) -> list[str]:
    rows = []
    errors = []
    for few, most in find_series(steps):
        published = _tokens_per_s(most, most.row.step_s) / _tokens_per_s(few, few.row.step_s)
        of_most, of_few = (_tokens_per_s(step, step.predicted.median) for step in (most, few))
        predicted = of_most / of_few
        errors.append(predicted - published)
        row = few.row
        cells = [row.source.name, row.target, row.model, f"{row.settings['seq_len']:,}"]
        cells += [f"{row.settings['gpus']} to {most.row.settings['gpus']}", f"{published:.0%}"]
        rows.append([*cells, f"{predicted:.0%}", f"{100 * errors[-1]:+.0f}"])
    heads = ("source", "GPU", "model", "T:", "GPUs:", "published:", "predicted:", "points:")
    within = sum(abs(error) <= _WITHIN for error in errors)
    return [
        "Tokens a second of a GPU with the most GPUs over that with the fewest.",
        *("", *lay_out(heads, rows)),
        *("", f"{within} of {len(errors)} are within 8 points."),
    ]


def private_runs(rows: Sequence[Row]) -> Page:
    """Numbers of private training."""
    return Page(private_numbers.tabulate(rows, private_numbers.compare(rows)))


def measured_steps(rows: Sequence[Row]) -> Page:
    """Steps that were measured for dpprof, and how far off predictions are."""
    cells = []
    timed: list[Step] = []
    errors: dict[str, list[float]] = {"peak memory": [], "reserved memory": []}
    for _, group in groupby(rows, key=lambda row: row.id):
        values = {row.quantity: row for row in group}
        row = next(iter(values.values()))
        if row.settings.get("execution") == "compiled":
            continue
        time, memory = predict_measured(row)
        told = ["", "", row.not_predicted]
        if "step time" in values and not row.not_predicted:
            step = Step(row, time)
            timed.append(step)
            told = [f"{time.median * 1e3:,.1f}", f"{time.low * 1e3:,.1f} to {time.high * 1e3:,.1f}"]
            told.append(f"{step.error:+.1%}")
        peak = values.get("peak memory")
        told.append("" if peak is None else f"{(peak.value or 0) / _MIB:,.0f}")
        for quantity, predicted in memory.items():
            measured = values[quantity].value if quantity in values else None
            error = [predicted / measured - 1] if measured else []
            errors[quantity] += map(abs, error)
            told.append(f"{error[0]:+.3%}" if error else "")
        cells.append([*_describe(row), *told])
        say(" | ".join(cells[-1]))
    heads = ["GPU", "model", "method", "execution", "dtype", "B:", "T:", "measured (ms):"]
    heads += ["predicted (ms):", "90 % interval:", "error:", "peak measured (MiB):"]
    heads += ["peak predicted:", "reserved predicted:"]
    inside = f"{sum(step.is_inside for step in timed)} of {len(timed)} inside the interval"
    off = [abs(step.error) for step in timed]
    lines = lay_out(heads, cells)
    lines += ["", f"* step time: {_sum_up(off, 1)}; {inside}"]
    lines += [f"* peak of allocated memory: {_sum_up(errors['peak memory'], 4)}"]
    lines += [f"* reserved memory: {_sum_up(errors['reserved memory'], 2)}"]
    return Page("\n".join(lines))


def _describe(row: Row) -> list[str]:
    experiment = describe_measured(row)
    model = experiment.model if isinstance(experiment.model, str) else experiment.model_name
    model += "" if experiment.head == "logits" else f", head {experiment.head}"
    model += "" if experiment.checkpointing == "none" else ", checkpointed"
    seconds = f"{row.step_s * 1e3:,.1f}" if row.quantity == "step time" else ""
    return [
        row.gpu.removeprefix("NVIDIA ").partition(" ")[0],
        *(model, row.method, experiment.execution, experiment.dtype),
        *(str(experiment.batch_size), str(experiment.seq_len), seconds),
    ]


def _sum_up(errors: Sequence[float], digits: int) -> str:
    if not errors:
        return "none"
    median, most = statistics.median(errors), max(errors)
    return f"median absolute error {median:.{digits}%}, at most {most:.{digits}%}"


WRITERS = {page.__name__: page for page in (step_time, ranks, private_runs, measured_steps)}


def main() -> None:
    """Run from the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("page", choices=WRITERS)
    parser.add_argument(
        "--rows", type=Path, default=DATA, help="other rows, such as results/measured.csv"
    )
    parser.add_argument("--figure", type=Path, help="a file for the figure of steps")
    arguments = parser.parse_args()
    page = WRITERS[arguments.page](read_rows(arguments.page, arguments.rows))
    picture = f"\n![{draw.__doc__}]({arguments.figure.name})\n" if arguments.figure else ""
    publish(f"{PAGES[arguments.page]}\n{picture}", page.text, arguments.output)
    if arguments.figure:
        draw(page.steps).savefig(arguments.figure)


if __name__ == "__main__":
    main()
