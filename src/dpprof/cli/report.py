"""Write the report from tables and figures that exist: Markdown, LaTeX, PDF and HTML."""

from collections.abc import Sequence

from dpprof.analysis.tables.frames import TableFolder
from dpprof.cli.common import Parser, add_log_option, ending_in_a_sentence, path
from dpprof.report.content import build_document
from dpprof.report.document import read_drawing
from dpprof.report.latex import LatexError
from dpprof.report.page.write import write_page
from dpprof.report.render import ROUTES, write_report
from dpprof.spec import registry
from dpprof.system.console import fail, keep_log


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
    parser.add_argument(
        "--pdf",
        choices=["auto", *ROUTES],
        default="auto",
        help="what makes the PDF: latex (latexmk), typst, or auto: latex where it is installed",
    )
    add_log_option(parser, "what is printed")
    arguments = parser.parse_args(argv)
    keep_log(arguments.log)
    figures = arguments.output_dir / "figures"
    with ending_in_a_sentence():
        captions = (figures / f"{name}.json" for name in registry.names("figures"))
        drawings = [read_drawing(caption) for caption in captions if caption.is_file()]
        tables = TableFolder(arguments.tables)
        document = build_document(tables, drawings)
        try:
            write_report(document, arguments.output_dir, arguments.pdf)
        except LatexError as error:
            fail(f"--pdf latex: {error}")
        write_page(document, tables, arguments.output_dir)
