"""Write the report from tables and figures that exist: Markdown, LaTeX, PDF and HTML.

Of two folders of results, such as those of two GPUs or two versions, write what differs from the
first to the second instead: Markdown, LaTeX and PDF.
"""

from collections.abc import Sequence
from pathlib import Path

from dpprof.ask.commands.common import Parser, ending_in_a_sentence, path
from dpprof.experiments.config import registry
from dpprof.experiments.config.validation import InputError, read_model
from dpprof.experiments.records.comparison import ACROSS
from dpprof.results.analysis.gate.regressions import Options, compare_folders, read_results_folder
from dpprof.results.analysis.tables.frames import TableFolder
from dpprof.results.report.comparison import compare_sweeps
from dpprof.results.report.content import build_document
from dpprof.results.report.page.write import write_page
from dpprof.results.report.rendering.document import Drawing
from dpprof.results.report.rendering.write import write_report


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
            baseline, candidate = map(read_results_folder, arguments.sweeps)
            comparison = compare_folders(baseline, candidate, Options(across=ACROSS))
            arguments.output_dir.mkdir(parents=True, exist_ok=True)
            write_report(compare_sweeps(comparison, arguments.sweeps), arguments.output_dir)
        else:
            raise InputError("give either --tables, or two folders of results to compare")


def _report(folder: Path, output: Path) -> None:
    figures = output / "figures"
    captions = (figures / f"{name}.json" for name in registry.names("figures"))
    what = "a figure's description"
    drawings = [read_model(file, Drawing, what) for file in captions if file.is_file()]
    tables = TableFolder(folder)
    document = build_document(tables, drawings)
    write_report(document, output)
    write_page(document, tables, output)
