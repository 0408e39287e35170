"""Write the report from tables and figures that exist: Markdown, LaTeX, PDF and HTML.

Of two folders of results, such as those of two GPUs or two versions, write what differs from the
first to the second instead: Markdown, LaTeX and PDF.
"""

from collections.abc import Sequence
from pathlib import Path

from dpprof.analysis.gate.folders import read_results_folder
from dpprof.analysis.gate.regressions import Options, compare_folders
from dpprof.analysis.tables.frames import TableFolder
from dpprof.cli.common import Parser, ending_in_a_sentence, path
from dpprof.records.comparison import ACROSS
from dpprof.report.content import build_document
from dpprof.report.page.write import write_page
from dpprof.report.rendering.document import read_drawing
from dpprof.report.rendering.write import write_report
from dpprof.report.two_sweeps import compare_sweeps
from dpprof.spec import registry
from dpprof.spec.validation import InputError


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = Parser("report", __doc__, example="h100/results h200/results --output-dir both")
    parser.add_argument(
        "sweeps", type=path, nargs="*", metavar="RESULTS", help="two folders of results to compare"
    )
    parser.add_argument("--tables", type=path, help="the folder of the CSV tables to report on")
    parser.add_argument(
        "--output-dir",
        type=path,
        required=True,
        help="where the report goes; its figures are in the folder figures in it",
    )
    arguments = parser.parse_and_log(argv, "what is printed")
    with ending_in_a_sentence():
        if arguments.tables is not None and not arguments.sweeps:
            _report(arguments.tables, arguments.output_dir)
        elif arguments.tables is None and len(arguments.sweeps) == 2:  # noqa: PLR2004 (two sides)
            _compare(arguments.sweeps, arguments.output_dir)
        else:
            raise InputError("give either --tables, or two folders of results to compare")


def _report(folder: Path, output: Path) -> None:
    figures = output / "figures"
    captions = (figures / f"{name}.json" for name in registry.names("figures"))
    drawings = [read_drawing(caption) for caption in captions if caption.is_file()]
    tables = TableFolder(folder)
    document = build_document(tables, drawings)
    write_report(document, output)
    write_page(document, tables, output)


def _compare(folders: Sequence[Path], output: Path) -> None:
    baseline, candidate = map(read_results_folder, folders)
    found = compare_folders(baseline, candidate, Options(across=ACROSS))
    output.mkdir(parents=True, exist_ok=True)
    write_report(compare_sweeps(found, folders), output)
