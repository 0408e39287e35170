"""Draw one figure from tables that exist."""

from collections.abc import Sequence

from dpprof.ask.commands import common
from dpprof.experiments.config import registry
from dpprof.results.analysis.standings import find_marks
from dpprof.results.analysis.tables.frames import TableFolder
from dpprof.results.figures import style
from dpprof.results.report.rendering.document import Drawing
from dpprof.system.files import check_writable, write_atomically

KINDS = (*common.DRAWINGS, ".json")


def main(argv: Sequence[str] | None = None) -> None:
    """Run from the command line."""
    parser = common.Parser("figure", __doc__)
    parser.add_argument(
        "--figure", required=True, help="which: " + ", ".join(registry.names("figures"))
    )
    parser.add_argument(
        "--tables", type=common.path, required=True, help="the folder of the CSV tables"
    )
    parser.add_argument(
        "--output",
        type=common.path_ending_in(KINDS),
        action="append",
        required=True,
        help="a .png, .pdf or .svg to write, or a .json for the caption",
    )
    arguments = parser.parse_and_log(argv, "what is printed")
    with common.ending_in_a_sentence():
        registry.check("figures", arguments.figure, "--figure")
        draw = registry.load("figures", arguments.figure)
        for output in arguments.output:
            check_writable(output)
        missing = None
        marked: dict[str, list[str]] = {}
        try:
            tables = TableFolder(arguments.tables)
            figure = draw(tables)
            marked = style.mark_methods(figure, find_marks(tables["verification"]))
        except style.NothingToDrawError as nothing:
            missing = str(nothing)
            figure = style.say_nothing_to_draw(f"Nothing to draw: {missing}.")
        caption = registry.caption("figures", arguments.figure)
        for mark, methods in marked.items():
            caption += f" {mark} {style.MEANINGS[mark]}: {', '.join(methods)}."
        said = str(figure.get_label())
        drawing = Drawing(name=arguments.figure, said=said, caption=caption, missing=missing)
        for output in arguments.output:
            if output.suffix == ".json":
                write_atomically(output, drawing.model_dump_json() + "\n")
            else:
                common.save_figure(figure, output)
