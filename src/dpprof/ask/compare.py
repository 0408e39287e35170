"""Say what got worse from one folder of results to another: memory, FLOPs, bytes moved, time.

Memory, FLOPs and bytes moved are compared exactly, step times by the statistics of the report.
The exit status is 0 where nothing is worse, 1 for a regression, and 2 where the folders are not
comparable or the input is wrong.
"""

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from pydantic import ValidationError

from dpprof.ask.commands.common import FILE, Parser, ending_in_a_sentence, names_of, path
from dpprof.experiments.config.config_files import read_config_file
from dpprof.experiments.config.validation import InputError, explain, refuse
from dpprof.experiments.records.comparison import (
    ACROSS,
    EXIT_STATUS,
    METRICS,
    FolderComparison,
    Thresholds,
)
from dpprof.results.analysis.gate.regressions import Options, compare_folders, read_results_folder
from dpprof.results.report.comparison import HEADER, list_changes, list_remarks, summarise
from dpprof.results.report.rendering.templates import escape_line, on_one_line
from dpprof.system.files import check_writable, write_atomically


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


FORMATS: dict[str, Callable[[FolderComparison], str]] = {
    "text": render_text,
    "markdown": render_markdown,
    "json": lambda comparison: json.dumps(comparison.model_dump(mode="json"), indent=1),
}


def read_thresholds(file: Path | None) -> Thresholds:
    """Read a file of thresholds; missing keys keep their defaults.

    Raises:
        InputError: It is no YAML, or a key or a value is not allowed.
        OSError: The file cannot be read.
    """
    thresholds = None if file is None else read_config_file(file)
    if thresholds is None:
        return Thresholds()
    if not isinstance(thresholds, dict):
        allowed = f"it must be a mapping of {', '.join(sorted(Thresholds.model_fields))}"
        raise refuse(str(file), thresholds, allowed)
    try:
        return Thresholds.model_validate(thresholds)
    except ValidationError as error:
        raise InputError(f"{file}: {explain(error, Thresholds)}") from None


def make_parser() -> Parser:
    """Make the options: two folders, what is compared, and how strictly."""
    parser = Parser(
        "compare",
        __doc__,
        example="main/results results --metrics memory,flops --format markdown --output comment.md",
    )
    parser.add_argument(
        "baseline", type=path, metavar="BASELINE", help="the folder of results to compare with"
    )
    parser.add_argument(
        "candidate", type=path, metavar="CANDIDATE", help="the folder of results that may be worse"
    )
    parser.add_argument(
        "--metrics",
        type=names_of(METRICS),
        default=list(METRICS),
        metavar="NAMES",
        help="what is compared, comma-separated; flops includes bytes moved (default: "
        f"{','.join(METRICS)})",
    )
    parser.add_argument(
        "--thresholds",
        **FILE,
        help="how much worse figures may get: a YAML file, such as {components: {noise: 2%%}, "
        "time: 10%%} (default: time 5%%, all others 0)",
    )
    parser.add_argument(
        "--across",
        type=names_of(ACROSS),
        default=[],
        metavar="NAMES",
        help="compare even where these differ, comma-separated, of "
        f"{', '.join(ACROSS)}; times on different devices are never compared",
    )
    parser.add_argument(
        "--format", choices=list(FORMATS), default="text", help="the output format (default: text)"
    )
    parser.add_argument(
        "--output", **FILE, help="write it to a file, and print the text (default: print it)"
    )
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    arguments = make_parser().parse_args(argv)
    with ending_in_a_sentence(status=EXIT_STATUS["not comparable"]):
        if arguments.output is not None:
            check_writable(arguments.output)
        sides = arguments.baseline, arguments.candidate
        thresholds = read_thresholds(arguments.thresholds)
        if all(side.exists() for side in sides) and sides[0].samefile(sides[1]):
            raise InputError(f"{sides[1]}: baseline and candidate are the same folder; name two")
        options = Options(arguments.metrics, arguments.across, thresholds)
        baseline, candidate = map(read_results_folder, sides)
        comparison = compare_folders(baseline, candidate, options)
        rendered = FORMATS[arguments.format](comparison)
        if arguments.output is not None:
            write_atomically(arguments.output, rendered + "\n")
            rendered = render_text(comparison)
    print(rendered)
    sys.exit(comparison.exit_status)
