"""Tables of results under several releases of a library, and of what each release changed."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple

from dpprof.experiments.config.experiment import Experiment
from dpprof.experiments.config.validation import InputError
from dpprof.experiments.records.comparison import ComparedFigure, FolderComparison
from dpprof.experiments.records.result import Result
from dpprof.results.analysis.difference.waterfall import name_component
from dpprof.results.analysis.gate.folders import ResultsFolder
from dpprof.results.analysis.gate.judging import list_families
from dpprof.results.analysis.gate.regressions import Options, compare_folders

OPTIONS = Options(metrics=("memory", "flops"), across=("versions",))
"""How a release is compared with the one before."""

MOST_PARTS = 3
"""How many components or op kinds are listed of one change; the rest is one row."""

REST = "all else"
_SMALL = 1e-4
"""The least share of a total that is told as one."""


class Place(NamedTuple):
    """Where a step is looked at."""

    title: str
    instrument: str
    fields: Mapping[str, str]


PLACES = (
    Place("CPU, recorded", "memory", {"device": "cpu"}),
    Place("H100, predicted", "estimate", {"device": "cuda", "target": "h100"}),
)


class Quantity(NamedTuple):
    """What has a table: the sum of some figures of a step, and the figure that tells its parts."""

    name: str
    unit: str
    per_unit: float
    totals: tuple[str, ...]
    part: str


QUANTITIES = (
    Quantity("Peak", "MiB", 2**20, ("peak",), "component"),
    Quantity("FLOPs", "GFLOP", 1e9, ("executed FLOPs", "other FLOPs"), "FLOPs"),
    Quantity("Bytes moved", "MiB", 2**20, ("bytes moved",), "bytes moved"),
)


class Sweep(NamedTuple):
    """What runs under every release."""

    methods: Sequence[str]
    fields: Mapping[str, Any]
    """Of all experiments, besides method and place."""

    def experiment(self, place: Place, method: str) -> Experiment:
        """Return the experiment of a method in a place."""
        return Experiment.model_validate({**self.fields, **place.fields, "method": method})

    def find(self, folder: ResultsFolder, place: Place, method: str) -> Result:
        """Return its result."""
        return folder.runs[self.experiment(place, method).id, place.instrument][0]


def measure(result: Result, quantity: Quantity) -> int | None:
    """Return a quantity of a result; None if the run failed."""
    if result.outcome != "ok":
        return None
    families = list_families(result, OPTIONS.metrics).values()
    figures = [item for family in families for item in family.items()]
    return sum(int(v) for f, v in figures if f.name in quantity.totals and f.part is None)


def tabulate(folders: Mapping[str, ResultsFolder], sweep: Sweep) -> Iterator[str]:
    """Lay out each quantity in each place: a row for each method, a column for each release.

    What differs from the column before is bold.
    """
    for place in PLACES:
        for quantity in QUANTITIES:
            yield f"\n### {quantity.name} ({quantity.unit}), {place.title}\n"
            yield f"| method | {' | '.join(folders)} |"
            yield "| --- |" + " ---: |" * len(folders)
            for method in sweep.methods:
                runs = [sweep.find(folder, place, method) for folder in folders.values()]
                known = [measure(run, quantity) for run in runs]
                cells = [
                    run.outcome if value is None else f"{value / quantity.per_unit:,.2f}"
                    for run, value in zip(runs, known, strict=True)
                ]
                for at, (was, now) in enumerate(pairwise(known), start=1):
                    if was is not None and now not in (None, was):
                        cells[at] = f"**{cells[at]}**"
                yield f"| `{method}` | {' | '.join(cells)} |"


def tell_failures(folders: Mapping[str, ResultsFolder]) -> Iterator[str]:
    """Say why runs failed: once for each reason."""
    failed: dict[tuple[str, str], dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    for release, folder in folders.items():
        for (result,) in folder.runs.values():
            if result.error is not None:
                reason = result.error.message.rpartition("cannot be imported: ")[2]
                reason = re.sub(r" \(/[^)]*\)", "", reason)  # the path of the installed file
                failed[result.outcome, reason][release].add(result.experiment.method)
    for (outcome, reason), by_release in failed.items():
        for methods, releases in groupby(by_release.items(), key=lambda item: item[1]):
            names = ", ".join(f"`{method}`" for method in sorted(methods))
            told = ", ".join(release for release, _ in releases)
            yield f"* {names} with Opacus {told}: {outcome}, `{reason}`"


Row = tuple[str, ...]
"""The name of a quantity or of a part of it, and a cell for each place."""


def tell_changes(
    before: ResultsFolder, after: ResultsFolder, sweep: Sweep
) -> tuple[dict[tuple[Row, ...], list[str]], list[str]]:
    """Return rows of what changed, with the methods that share them; and methods without change.

    Methods that failed on one side are in neither.

    Raises:
        InputError: The sides differ in more than versions, such as in the machine.
    """
    found = compare_folders(before, after, OPTIONS)
    if found.not_comparable:
        raise InputError(f"{after.path} against {before.path}: {found.reason}")
    changed: dict[tuple[Row, ...], list[str]] = {}
    same = []
    for method in sweep.methods:
        sides = [
            [sweep.find(folder, place, method) for place in PLACES] for folder in (before, after)
        ]
        if any(run.outcome != "ok" for side in sides for run in side):
            continue
        rows = tuple(row for q in QUANTITIES for row in _rows(found, sweep, method, q, sides))
        if rows:
            changed.setdefault(rows, []).append(method)
        else:
            same.append(method)
    return changed, same


def _rows(
    found: FolderComparison,
    sweep: Sweep,
    method: str,
    quantity: Quantity,
    sides: Sequence[Sequence[Result]],
) -> Iterator[Row]:
    """List a quantity's change, its largest parts, and the rest: rows after the first sum to it."""
    was, now = ([measure(run, quantity) or 0 for run in side] for side in sides)
    rest = [b - a for a, b in zip(was, now, strict=True)]
    parts: dict[str, list[int]] = defaultdict(lambda: [0] * len(PLACES))
    for at, place in enumerate(PLACES):
        key = sweep.experiment(place, method).id, place.instrument
        for one in found.figures:
            if (one.experiment_id, one.instrument) == key and one.figure == quantity.part:
                parts[_name_part(one)][at] += _difference(one)
    parts.pop("", None)  # bytes moved in all
    if not any(rest) and not parts:
        return
    totals = [_spell(size, of) for size, of in zip(rest, was, strict=True)]
    yield f"**{quantity.name}**", *totals
    ranked = sorted(parts.items(), key=lambda item: -max(map(abs, item[1])))
    for name, sizes in ranked[:MOST_PARTS]:
        yield name, *map(_spell, sizes)
        rest = [left - size for left, size in zip(rest, sizes, strict=True)]
    if any(rest):
        yield REST, *map(_spell, rest)


def _name_part(figure: ComparedFigure) -> str:
    if figure.figure == "component":
        return name_component(figure.part or "")
    phase = (figure.phase or "").replace("_", " ")
    return f"{figure.part} in {phase}" if figure.part else ""


def _difference(figure: ComparedFigure) -> int:
    was, now = figure.baseline, figure.candidate
    return int(now) - int(was) if isinstance(was, int) and isinstance(now, int) else 0


def _spell(size: int, of: int | None = None) -> str:
    share = f" ({100 * size / of:+.2f} %)" if of and abs(size) >= of * _SMALL else ""
    return f"{size:+,}{share}" if size else "0"
