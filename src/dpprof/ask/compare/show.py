"""What ``dpprof compare`` says: for a terminal, and as Markdown for a pull request."""

from dpprof.experiments.records.comparison import FolderComparison
from dpprof.results.report.comparison import HEADER, list_changes, list_remarks, summarise
from dpprof.results.report.rendering.templates import escape_line, on_one_line


def render_text(comparison: FolderComparison) -> str:
    """Return the comparison for a terminal: what got worse first."""
    said = [summarise(comparison)]
    for heading, rows, left_out in list_changes(comparison):
        said += ["", heading]
        widths = [max(len(row.cells[column]) for row in rows) for column in range(len(HEADER))]
        for row in rows:
            *names, was, now, change = (
                cell.ljust(width) for cell, width in zip(row.cells, widths, strict=True)
            )
            said.append("  " + "  ".join([*names, f"{was} -> {now}", change]).rstrip())
            said += [f"      {row.note}"] if row.note else []
        said += [f"  {left_out}"] if left_out else []
    if commands := _commands(comparison):
        said += ["", "Why memory differs:", *(f"  {command}" for command in commands)]
    said += ["", *list_remarks(comparison)]
    return "\n".join(map(on_one_line, said))


def render_markdown(comparison: FolderComparison) -> str:
    """Return the comparison as Markdown; every name in it stays text."""
    said = [f"**dpprof compare: {comparison.verdict}**", "", escape_line(summarise(comparison))]
    for heading, rows, left_out in list_changes(comparison):
        said += ["", f"### {heading}", "", f"| {' | '.join(HEADER)} |"]
        said.append("| :--- | :--- | :--- | ---: | ---: | ---: |")
        for row in rows:
            cells = [escape_line(cell) for cell in row.cells]
            cells[0] += f"<br>{escape_line(row.note)}" if row.note else ""
            said.append(f"| {' | '.join(cells)} |")
        said += ["", left_out] if left_out else []
    if commands := _commands(comparison):
        said += ["", "Why memory differs:", "", "```sh", *map(on_one_line, commands), "```"]
    said += ["", *(f"* {escape_line(remark)}" for remark in list_remarks(comparison))]
    return "\n".join(said)


def _commands(comparison: FolderComparison) -> list[str]:
    """Return the commands that explain memory, those of the worst first."""
    commands = {(e.experiment_id, e.instrument): e.command for e in comparison.explanations}
    runs = [(f.experiment_id, f.instrument) for f in comparison.figures if f.metric == "memory"]
    return [commands[run] for run in dict.fromkeys(runs) if run in commands][:3]
