"""What intervals hold of sources that are left out: times of steps, and peaks of memory.

    export PYTHONPATH=src:tests
    python perf/intervals.py --output perf/intervals.md

A source is judged with the interval that the others alone give, so none of its rows had a part in
it. All sources count the same there, however many rows they have. Beside the errors of operators,
an interval has a spread of the whole step: a standard deviation of the logarithm, the least with
which 90 % of the others' rows are inside. Rows are those of the other pages here, of ratios.jsonl
and of docs/numbers/data; compiled steps are left out. An estimate takes the largest spread of the
first table (``dpprof.predict.step_time.intervals``); for image models that of the second, too.
"""

import csv
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from dpprof.predict.step_time.gpu_model import GpuModel
from dpprof.predict.step_time.op_time import Z_90
from evidence import SOURCES, Row, find_target, read_rows
from ratios import read_steps
from script import lay_out, make_parser, publish

_HERE = Path(__file__).parent
_TABLES = _HERE.parent / "docs" / "numbers" / "data"
_ENOUGH = 0.9
_GRID = [number / 100 for number in range(200)]
_TEXTS, _IMAGES, _STATED, _UNSTATED = "texts", "images", "stated", "unstated"
_GROUPS = {
    "Times": (_TEXTS, _IMAGES),
    "Times of image models": (_IMAGES,),
    "Peaks, where the source states all that a prediction needs": (_STATED,),
    "Peaks, where it does not": (_UNSTATED,),
}
_FINE_TUNING = {"t4": "fitcheck-llm", "a100": "fms-acceleration"}


class Number(NamedTuple):
    """A number beside its prediction."""

    group: str
    """A key of ``_GROUPS``."""

    source: str
    error: float
    """Logarithm of what was measured over what was predicted."""

    spread: float = 0.0
    """Standard deviation of that, by the errors of operators."""

    kind: tuple[str, str, str] | None = None
    """Compute capability, training and number of GPUs of a step."""

    def is_inside(self, more: float) -> bool:
        """Whether it is in a 90 % interval with so much more spread."""
        return abs(self.error) <= Z_90 * math.hypot(self.spread, more)


def find_least(numbers: Sequence[Number]) -> float:
    """Return the least spread with which 90 % are inside, where each source counts the same."""
    sources = split(numbers).values()
    return next(
        more
        for more in _GRID
        if statistics.fmean(_share_inside(source, more) for source in sources) >= _ENOUGH
    )


def _share_inside(numbers: Sequence[Number], more: float) -> float:
    return statistics.fmean(number.is_inside(more) for number in numbers)


def split(numbers: Sequence[Number]) -> Mapping[str, list[Number]]:
    """Split numbers by source."""
    by_source = defaultdict(list)
    for number in numbers:
        by_source[number.source].append(number)
    return by_source


def find_lone(numbers: Sequence[Number]) -> list[Number]:
    """Return those whose kind no other source has."""
    sources = defaultdict(set)
    for number in numbers:
        sources[number.kind].add(number.source)
    return [number for number in numbers if len(sources[number.kind]) == 1]


def read_numbers() -> list[Number]:
    """Read every number that has a prediction."""
    return [*_read_shared("step_time"), *_read_shared("ranks"), *_read_steps(), *_read_tables()]


def _read_shared(page: str) -> Iterator[Number]:
    """Yield the steps of a page, whose rows are in the order of evidence.csv."""
    rows = (row for row in read_rows(page) if not row.not_predicted)
    tables = (cells for cells in _read_page(page) if "published (ms)" in cells)
    for row, cells in zip(rows, tables, strict=True):
        if not row.is_compiled:
            low, high = map(_to_number, cells["90 % interval"].split(" to "))
            measured, predicted = (
                _to_number(cells[name]) for name in ("published (ms)", "predicted (ms)")
            )
            gpus = row.settings.get("gpus", 1) if page == "ranks" else 1
            spread = math.log(high / low) / 2 / Z_90
            yield _time(row, measured / predicted, spread, gpus=gpus)


def _read_steps() -> Iterator[Number]:
    for step in read_steps():
        settings = step.row.settings
        is_of_text = step.row.model.startswith(("bert", "gpt2", "roberta")) or step.is_ours
        tokens = settings.get("seq_len", settings.get("size")) if is_of_text else 1
        ratio = step.sample_s / (step.parts.seconds * tokens)
        yield _time(step.row, ratio, step.parts.spread, group=_TEXTS if is_of_text else _IMAGES)


def _time(row: Row, ratio: float, spread: float, *, group: str = _TEXTS, gpus: int = 1) -> Number:
    kind = (
        find_target(row.target).compute_capability,
        "plain" if row.method == "standard" else "private",
        "one GPU" if gpus == 1 else "several GPUs",
    )
    return Number(group, _name(row), math.log(ratio), spread, kind)


def _name(row: Row) -> str:
    """Return one name for all that a source has, which pages show in several sections."""
    name = "our own" if row.page == "measured_steps" else row.source.name.partition(",")[0]
    return name.removesuffix(" branch").removesuffix(" 2024")


def _read_tables() -> Iterator[Number]:
    for target, name in _FINE_TUNING.items():
        gpu = find_target(target)
        for row in _read_csv(f"published-finetuning-{target}"):
            peak = float(row["peak_mib"]) / float(row["predicted_peak_mib"])
            yield Number(_STATED, name, math.log(peak))
            if row["step_s"]:
                ratio = float(row["step_s"]) / float(row["predicted_step_s"])
                spread = GpuModel(gpu, "bfloat16").common_spread  # at least
                kind = (gpu.compute_capability, "plain", "one GPU")
                yield Number(_TEXTS, name, math.log(ratio), spread, kind)
    for row in _read_csv("published-memory"):
        ratio = float(row["published"]) / float(row["predicted"])
        yield Number(_STATED, row["source"], math.log(ratio))
    for row in _read_csv("published-loops"):
        peak = float(row["measured_gb"]) / float(row["predicted_gb"])
        yield Number(_UNSTATED, row["source"].rpartition("/")[2].partition(",")[0], math.log(peak))
    complete = {source.name: source.complete for source in SOURCES.values()}
    for cells in _read_page("private_runs"):
        if cells.get("number") == "peak (MiB)" and _is_number(cells["published"]):
            name = cells["section"]
            group = _STATED if complete[name] else _UNSTATED
            ratio = _to_number(cells["published"]) / _to_number(cells["predicted"])
            yield Number(group, name.partition(",")[0], math.log(ratio))
    for cells in _read_page("measured_steps"):
        if _is_number(told := cells.get("peak predicted", "").rstrip("%")):
            yield Number(_STATED, "our own", -math.log1p(float(told) / 100))


def _read_csv(name: str) -> Iterator[dict[str, str]]:
    with (_TABLES / f"{name}.csv").open(encoding="utf-8", newline="") as file:
        yield from csv.DictReader(file)


def _read_page(page: str) -> Iterator[dict[str, str]]:
    """Yield the rows of a page's tables by their heads, with the section that they are in."""
    section = ""
    heads: list[str] = []
    for line in (_HERE / f"{page}.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("## "):
            section = line[3:]
        if not line.startswith("|"):
            heads = []
        elif not heads:
            heads = cells
        elif not cells[0].startswith("---"):
            yield {"section": section, **dict(zip(heads, cells, strict=True))}


def _to_number(text: str) -> float:
    return float(text.replace(",", "").rstrip(" *"))


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(_to_number(text))
    except ValueError:
        return False


class Judged(NamedTuple):
    """A source, with the spread that the others give."""

    source: str
    numbers: Sequence[Number]
    more: float

    @property
    def inside(self) -> int:
        """How many of its numbers are inside."""
        return sum(number.is_inside(self.more) for number in self.numbers)


def judge(numbers: Sequence[Number]) -> list[Judged]:
    """Judge each source by what the others give."""
    return [
        Judged(source, own, find_least([some for some in numbers if some.source != source]))
        for source, own in split(numbers).items()
    ]


def _lay_out(name: str, numbers: Sequence[Number], told: Sequence[object]) -> list[object]:
    errors = [math.expm1(-number.error) for number in numbers]
    off = [abs(error) for error in errors]
    tenth = statistics.quantiles(off, n=10)[-1] if len(off) > 1 else off[0]
    cells = [
        f"{statistics.median(errors):+.1%}",
        f"{statistics.median(off):.1%}",
        f"{min(tenth, max(off)):.1%}",
    ]
    return [name, len(off), *cells, *told]


def tabulate(numbers: Sequence[Number]) -> str:
    """Lay out each group: its sources, each with what the others give, and all together."""
    lines: list[str] = []
    for title, groups in _GROUPS.items():
        some = [number for number in numbers if number.group in groups]
        judged = judge(some)
        rows = [
            _lay_out(one.source, one.numbers, [one.more, f"{one.inside} of {len(one.numbers)}"])
            for one in judged
        ]
        inside = sum(one.inside for one in judged)
        share = f"{inside} of {len(some)} ({inside / len(some):.0%})"
        rows.append(_lay_out("all", some, [find_least(some), share]))
        errors = ("median error:", "median absolute error:", "90th percentile:")
        heads = ("source", "rows:", *errors, "spread of the others:", "inside:")
        lines += [f"## {title}", "", *lay_out(heads, rows), ""]
    return "\n".join(lines).rstrip()


def main() -> None:
    """Run from the command line."""
    arguments = make_parser(__doc__).parse_args()
    publish(__doc__, tabulate(read_numbers()), arguments.output)


if __name__ == "__main__":
    main()
