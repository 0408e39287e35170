"""The comparison of two folders of results for a terminal, and as Markdown for a pull request."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from dpprof.experiments.records.comparison import ComparedFigure, FolderComparison, Judgement
from dpprof.results.analysis.difference.waterfall import format_change, name_component
from dpprof.results.report.rendering.templates import escape_line, on_one_line
from dpprof.results.report.wording import plural

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


class Row(NamedTuple):
    """A figure of both sides as texts, and what else is to know of it."""

    cells: tuple[str, ...]
    note: str | None


def summarise(found: FolderComparison) -> str:
    """Say in a sentence what came out."""
    counts = found.counts
    worse = sum(1 for one in found.figures if one.judgement == "worse")
    if found.verdict == "regression":
        changed = f"{worse:,} {plural(worse, 'figure is', 'figures are')} worse"
    elif found.verdict == "nothing worse":
        changed = "nothing is worse"
    else:
        changed = f"not comparable: {found.reason}"
    better = counts.get("better", 0)
    told = f", {better:,} {plural(better, 'is', 'are')} better" if better else ""
    return f"{found.candidate} against {found.baseline}: {changed}{told}."


def render_text(found: FolderComparison) -> str:
    """Return the comparison for a terminal: what got worse first."""
    said = [summarise(found)]
    for heading, rows, left_out in list_changes(found):
        said += ["", heading]
        widths = [max(len(row.cells[at]) for row in rows) for at in range(len(HEADER))]
        for row in rows:
            *names, was, now, change = (
                cell.ljust(width) for cell, width in zip(row.cells, widths, strict=True)
            )
            said.append("  " + "  ".join([*names, f"{was} -> {now}", change]).rstrip())
            said += [f"      {row.note}"] if row.note else []
        said += [f"  {left_out}"] if left_out else []
    if commands := _commands(found):
        said += ["", "Why memory differs:", *(f"  {command}" for command in commands)]
    said += ["", *list_remarks(found)]
    return "\n".join(map(on_one_line, said))


def render_markdown(found: FolderComparison) -> str:
    """Return the comparison as Markdown; every name in it stays text."""
    said = [f"**dpprof compare: {found.verdict}**", "", escape_line(summarise(found))]
    for heading, rows, left_out in list_changes(found):
        said += ["", f"### {heading}", "", f"| {' | '.join(HEADER)} |"]
        said.append("| :--- | :--- | :--- | ---: | ---: | ---: |")
        for row in rows:
            cells = [escape_line(cell) for cell in row.cells]
            cells[0] += f"<br>{escape_line(row.note)}" if row.note else ""
            said.append(f"| {' | '.join(cells)} |")
        said += ["", left_out] if left_out else []
    if commands := _commands(found):
        said += ["", "Why memory differs:", "", "```sh", *map(on_one_line, commands), "```"]
    said += ["", *(f"* {escape_line(remark)}" for remark in list_remarks(found))]
    return "\n".join(said)


def list_changes(found: FolderComparison) -> Iterator[tuple[str, list[Row], str]]:
    """Yield each judgement with the first of its figures, and what is said of the others."""
    for judgement, heading in _HEADINGS.items():
        figures = [one for one in found.figures if one.judgement == judgement]
        if figures:
            yield heading, [_row(one) for one in figures[:_MOST_ROWS]], _left_out(figures)


def _left_out(items: Sequence[object]) -> str:
    beyond = len(items) - _MOST_ROWS
    return f"and {beyond:,} more; --format json lists all" if beyond > 0 else ""


def _row(one: ComparedFigure) -> Row:
    notes = [one.reason, _spell_statistics(one)]
    note = "; ".join(text[:_MOST_LETTERS] for text in notes if text)
    values = (_spell_value(value, one.unit, one.figure) for value in (one.baseline, one.candidate))
    return Row((_name(one), one.experiment_id, one.instrument, *values, _spell_change(one)), note)


def _name(one: ComparedFigure) -> str:
    if one.figure == "component":
        return f"{name_component(one.part or '')} at the peak"
    if one.part is not None:
        of = "of" if one.figure == "FLOPs" else "by"
        return f"{one.figure} {of} {one.part} in {(one.phase or '').replace('_', ' ')}"
    return one.figure


def _spell_value(value: float | str | None, unit: str | None, figure: str) -> str:
    if value is None or isinstance(value, str):
        return value or "-"
    if figure == "fits":
        return "yes" if value else "no"
    return f"{value * 1e3:,.4g} ms" if unit == "seconds" else f"{value:,} {unit or ''}".rstrip()


def _spell_change(one: ComparedFigure) -> str:
    was, now = one.baseline, one.candidate
    if not isinstance(was, int | float) or not isinstance(now, int | float) or one.unit is None:
        return ""
    share = "" if one.ratio is None else f"{100 * (one.ratio - 1):+.2f} %"
    if one.unit == "seconds":
        return share
    size = f"{now - was:+,}"
    if one.unit == "bytes":
        size = format_change(int(now - was))
    return f"{size} ({share})" if share else size


def _spell_statistics(one: ComparedFigure) -> str | None:
    known = one.statistics
    if known is None or known.ratio_low is None or known.ratio_high is None:
        return None
    said = f"ratio {one.ratio:.3f}, 95 % interval {known.ratio_low:.3f} to {known.ratio_high:.3f}"
    said += "" if known.noise_floor is None else f", noise floor {100 * known.noise_floor:.1f} %"
    said += "" if known.p_value is None else f", p {known.p_value:.2g}"
    return f"{said}, {known.baseline_processes} and {known.candidate_processes} processes"


def _commands(found: FolderComparison) -> list[str]:
    """Return the commands that explain memory, those of the worst first."""
    order = [(one.experiment_id, one.instrument) for one in found.figures if one.metric == "memory"]
    told = {(one.experiment_id, one.instrument): one.command for one in found.explanations}
    return [told[key] for key in dict.fromkeys(order) if key in told][:3]


def list_remarks(found: FolderComparison) -> list[str]:
    """Return what was not compared, and how much was."""
    said = []
    if found.not_comparable and found.verdict == "regression":
        said.append(f"Not everything is comparable: {found.reason}.")
    for one in found.not_comparable:
        why = f"because {one.name} is {one.baseline} and {one.candidate}"
        said.append(f"Not compared, {why}: {_list(one.experiment_ids)}.")
    sides = (("baseline", found.only_in_baseline), ("candidate", found.only_in_candidate))
    for side, runs in sides:
        named = [f"{run.experiment_id} ({run.instrument})" for run in runs]
        said += [f"Only in the {side}: {_list(named)}."] if named else []
    judged = ", ".join(f"{count:,} of {metric}" for metric, count in found.judged.items())
    told = f"{found.experiments:,} {plural(found.experiments, 'experiment')} in common"
    told += f", in {found.runs:,} {plural(found.runs, 'run')}. Figures judged: {judged}."
    return [*said, told]


def _list(names: Sequence[str]) -> str:
    left_out = _left_out(names)
    return ", ".join([*names[:_MOST_ROWS], *([left_out] if left_out else [])])
