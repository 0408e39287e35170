"""Run a notebook's cells in order, in one process, and print what they print.

python examples/run_notebook.py examples/private_finetuning.ipynb
python examples/run_notebook.py examples/private_finetuning.ipynb --keep

With --keep, what they print and return is kept in the notebook, and is part of the documentation.
"""

import argparse
import ast
import contextlib
import io
import json
from pathlib import Path
from typing import Any


def run_cell(source: str, names: dict[str, Any]) -> list[dict[str, Any]]:
    """Run a cell; return its outputs as a notebook has them."""
    tree = ast.parse(source)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(tree, "<cell>", "exec"), names)  # noqa: S102 (that is what it is for)
        value = None
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "<cell>", "eval"), names)  # noqa: S307
    outputs: list[dict[str, Any]] = []
    if text := printed.getvalue():
        outputs.append({"output_type": "stream", "name": "stdout", "text": split(text)})
    if value is not None:
        shown = {"text/plain": split(repr(value))}
        if hasattr(value, "_repr_html_"):
            shown["text/html"] = split(value._repr_html_())
        outputs.append({"output_type": "display_data", "metadata": {}, "data": shown})
    return outputs


def split(text: str) -> list[str]:
    """Return a text as the lines of a notebook's file."""
    return text.splitlines(keepends=True)


def run_notebook(notebook: dict[str, Any]) -> None:
    """Run all cells of code, and replace their outputs."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            cell["outputs"] = run_cell("".join(cell["source"]), names)
            for output in cell["outputs"]:
                print("".join(output.get("text") or output["data"]["text/plain"]))


def main() -> None:
    """Run from the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("notebook", type=Path)
    parser.add_argument("--keep", action="store_true", help="keep the outputs in the notebook")
    arguments = parser.parse_args()
    notebook = json.loads(arguments.notebook.read_text(encoding="utf-8"))
    run_notebook(notebook)
    if arguments.keep:
        arguments.notebook.write_text(json.dumps(notebook, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
