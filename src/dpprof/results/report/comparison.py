"""The comparison of two folders of results in words: what got worse, and what was not compared."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from dpprof.experiments.config.validation import InputError, explain
from dpprof.experiments.records.comparison import ComparedFigure, FolderComparison, Judgement
from dpprof.results.analysis.difference.waterfall import format_change, name_component
from dpprof.results.report.rendering.document import Bullets, Document, Paragraph, Section, Table
from dpprof.system.words import plural

_MOST_ROWS = 20
"""The most rows of a table, experiments in a list, and commands; JSON has all of them."""

_MOST_LETTERS = 200
_HEADINGS: Mapping[Judgement, str] = {
    "worse": "Worse",
    "better": "Better",
    "within threshold": "Worse within the threshold",
    "undecided": "Not decided",
}
HEADER = ("figure", "experiment", "instrument", "baseline", "candidate", "change")
_NUMERIC = (False, False, False, True, True, True, False)


class Row(NamedTuple):
    """A figure of both sides as texts, and what else is to know of it."""

    cells: tuple[str, ...]
    note: str | None


def compare_sweeps(comparison: FolderComparison, folders: Sequence[Path]) -> Document:
    """Return the report of what changed from one sweep to another, after the answer of each.

    Of the folders, the answer of a report that is there is quoted.

    Raises:
        InputError: A ``report.json`` is not one that this version writes.
    """
    sections = [*filter(None, map(_quote, folders))]
    for heading, rows, left_out in list_changes(comparison):
        caption = f"{heading}, the largest changes first{f'; {left_out}' if left_out else ''}."
        cells = tuple((*row.cells, row.note or "") for row in rows)
        table = Table(caption=caption, header=(*HEADER, "remark"), rows=cells, numeric=_NUMERIC)
        sections.append(Section(title=heading, blocks=(table,)))
    compared = Bullets(items=tuple(list_remarks(comparison)))
    return Document(
        title="Two sweeps side by side",
        question=f"What differs from {comparison.baseline} to {comparison.candidate}?",
        headline=(summarise(comparison),),
        sections=(*sections, Section(title="What was compared", blocks=(compared,))),
    )


def _quote(folder: Path) -> Section | None:
    """Return the question, the answer and the first table of a folder's report, if it has one."""
    path = folder / "report.json"
    if not path.is_file():
        return None
    try:
        told = Document.model_validate_json(path.read_bytes())
    except ValidationError as error:
        why = explain(error, Document)
        raise InputError(f"{path}: is no report of this version ({why}); run snakemake") from None
    said = [Paragraph(text=text) for text in (told.question, *told.headline) if text]
    blocks = told.sections[0].blocks if told.sections else ()
    tables = [block for block in blocks if isinstance(block, Table)]
    return Section(title=f"The answer of {folder}", blocks=(*said, *tables))


def summarise(comparison: FolderComparison) -> str:
    """Say in a sentence what came out."""
    worse = sum(figure.judgement == "worse" for figure in comparison.figures)
    better = comparison.counts.get("better", 0)
    changed = {
        "regression": f"{worse:,} {plural(worse, 'figure is', 'figures are')} worse",
        "nothing worse": "nothing is worse",
        "not comparable": f"not comparable: {comparison.reason}",
    }[comparison.verdict]
    told = f", {better:,} {plural(better, 'is', 'are')} better" if better else ""
    return f"{comparison.candidate} against {comparison.baseline}: {changed}{told}."


def list_changes(comparison: FolderComparison) -> Iterator[tuple[str, list[Row], str]]:
    """Yield each judgement with the first of its figures, and what is said of the others."""
    for judgement, heading in _HEADINGS.items():
        figures = [figure for figure in comparison.figures if figure.judgement == judgement]
        if figures:
            yield heading, [_row(figure) for figure in figures[:_MOST_ROWS]], _left_out(figures)


def _left_out(items: Sequence[object]) -> str:
    beyond = len(items) - _MOST_ROWS
    return f"and {beyond:,} more; --format json lists all" if beyond > 0 else ""


def _row(figure: ComparedFigure) -> Row:
    name: str = figure.figure
    if figure.figure == "component":
        name = f"{name_component(figure.part or '')} at the peak"
    elif figure.part is not None:
        of = "of" if figure.figure == "FLOPs" else "by"
        name = f"{figure.figure} {of} {figure.part} in {(figure.phase or '').replace('_', ' ')}"
    sides = (_spell_value(value, figure) for value in (figure.baseline, figure.candidate))
    cells = (name, figure.experiment_id, figure.instrument, *sides, _spell_change(figure))
    notes = [figure.reason, _spell_statistics(figure)]
    return Row(cells, "; ".join(text[:_MOST_LETTERS] for text in notes if text))


def _spell_value(value: float | str | None, figure: ComparedFigure) -> str:
    if value is None or isinstance(value, str):
        return value or "-"
    if figure.figure == "fits":
        return "yes" if value else "no"
    if figure.unit == "seconds":
        return f"{value * 1e3:,.4g} ms"
    return f"{value:,} {figure.unit or ''}".rstrip()


def _spell_change(figure: ComparedFigure) -> str:
    was, now = figure.baseline, figure.candidate
    if not isinstance(was, int | float) or not isinstance(now, int | float) or figure.unit is None:
        return ""
    share = "" if figure.ratio is None else f"{100 * (figure.ratio - 1):+.2f} %"
    if figure.unit == "seconds":
        return share
    size = format_change(int(now - was)) if figure.unit == "bytes" else f"{now - was:+,}"
    return f"{size} ({share})" if share else size


def _spell_statistics(figure: ComparedFigure) -> str | None:
    times = figure.statistics
    if times is None or times.ratio_low is None or times.ratio_high is None:
        return None
    interval = f"{times.ratio_low:.3f} to {times.ratio_high:.3f}"
    said = f"ratio {figure.ratio:.3f}, 95 % interval {interval}"
    said += "" if times.noise_floor is None else f", noise floor {100 * times.noise_floor:.1f} %"
    said += "" if times.p_value is None else f", p {times.p_value:.2g}"
    return f"{said}, {times.baseline_processes} and {times.candidate_processes} processes"


def list_remarks(comparison: FolderComparison) -> list[str]:
    """Return what was not compared, and how much was."""
    said = []
    if comparison.not_comparable and comparison.verdict == "regression":
        said.append(f"Not everything is comparable: {comparison.reason}.")
    for unlike in comparison.not_comparable:
        why = f"because {unlike.name} is {unlike.baseline} and {unlike.candidate}"
        said.append(f"Not compared, {why}: {_list(unlike.experiment_ids)}.")
    sides = (("baseline", comparison.only_in_baseline), ("candidate", comparison.only_in_candidate))
    for side, runs in sides:
        named = [f"{run.experiment_id} ({run.instrument})" for run in runs]
        said += [f"Only in the {side}: {_list(named)}."] if named else []
    judged = ", ".join(f"{count:,} of {metric}" for metric, count in comparison.judged.items())
    told = f"{comparison.experiments:,} {plural(comparison.experiments, 'experiment')} in common"
    told += f", in {comparison.runs:,} {plural(comparison.runs, 'run')}. Figures judged: {judged}."
    return [*said, told]


def _list(names: Sequence[str]) -> str:
    return ", ".join(filter(None, [*names[:_MOST_ROWS], _left_out(names)]))
