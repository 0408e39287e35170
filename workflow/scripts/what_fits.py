"""Write the tables of docs/numbers/what-fits.md from what ``dpprof.fits`` says."""

import os
import re
import tempfile
from collections.abc import Sequence
from pathlib import Path

from dpprof.ask.fits import WAYS, Cell, fits, list_cells, spell_pattern

PAGE = Path(__file__).resolve().parents[2] / "docs" / "numbers" / "what-fits.md"
PRICES = {"rtx-4090": 0.4, "t4": 0.35}
"""The GPUs of the page, and what an hour of each is taken to cost."""

_HEADER = """\
| model | trained | tokens | batch | peak, MiB | tokens/s | hours | price |
| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |
"""
_TABLES = re.compile(r"(<!-- tables -->\n).*(<!-- end -->)", re.DOTALL)


def render(target: str, price: float, cells: Sequence[Cell]) -> str:
    """Return the section of one GPU."""
    rows = [f"| {' | '.join(list_cells(cell))} |" for cell in cells]
    pattern, *options = spell_pattern(target, WAYS)
    ways = [f"* {way}: `{words}`" for way, words in (text.split(": ", 1) for text in options)]
    question = f"```bash\ndpprof fits --target {target} --price-per-hour {price:g}\n```\n"
    table = _HEADER + "\n".join(rows)
    alone = f"A row by itself is `{pattern}` with"
    return "\n".join([f"## {target}\n\n{question}\n{table}\n\n{alone}\n", *ways])


def write(sections: Sequence[str]) -> str:
    """Return the page with these sections."""
    text = "\n\n".join(sections)
    page = PAGE.read_text(encoding="utf-8")
    return _TABLES.sub(lambda match: f"{match[1]}\n{text}\n\n{match[2]}", page)


def main() -> None:
    """Run from the command line; answers that are kept are not found anew."""
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        sections = [
            render(target, price, fits(target, price_per_hour=price).cells)
            for target, price in PRICES.items()
        ]
    PAGE.write_text(write(sections), encoding="utf-8")


if __name__ == "__main__":
    main()
