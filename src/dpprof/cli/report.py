"""Write the report from tables and figures that exist: Markdown, LaTeX, PDF and HTML."""

from collections.abc import Sequence

from dpprof.analysis.tables.frames import TableFolder
from dpprof.cli.common import Parser, ending_in_a_sentence, path
from dpprof.report.content import build_document
from dpprof.report.page.write import write_page
from dpprof.report.rendering.document import read_drawing
from dpprof.report.rendering.write import write_report
from dpprof.spec import registry


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = Parser("report", __doc__)
    parser.add_argument("--tables", type=path, required=True, help="the folder of the CSV tables")
    parser.add_argument(
        "--output-dir",
        type=path,
        required=True,
        help="where the report goes; its figures are in the folder figures in it",
    )
    arguments = parser.parse_and_log(argv, "what is printed")
    figures = arguments.output_dir / "figures"
    with ending_in_a_sentence():
        captions = (figures / f"{name}.json" for name in registry.names("figures"))
        drawings = [read_drawing(caption) for caption in captions if caption.is_file()]
        tables = TableFolder(arguments.tables)
        document = build_document(tables, drawings)
        write_report(document, arguments.output_dir)
        write_page(document, tables, arguments.output_dir)
