"""What ``dpprof fits`` says."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from dpprof.ask.layout import format_number, lay_out

METHOD = "flash-bk"
_COLUMNS = ("batch", "peak, MiB", "tokens/s", "hours", "price")


def format_fits(cells: Sequence[Mapping[str, Any]], tokens: float) -> str:
    """Return a table for each GPU, and what would be needed where nothing fits.

    Args:
        cells: What fits, by target, model, way and length.
        tokens: The tokens that hours and prices are for.
    """
    lines: list[str] = []
    for target, group in groupby(cells, lambda cell: cell["target"]):
        of_target = list(group)
        told = f"the largest safe batches of {METHOD}; hours for {tokens:,.0f} tokens"
        lines += [f"{target}: {told}"]
        lines += lay_out([("model", "trained", "tokens", *_COLUMNS), *map(_row, of_target)], (0, 1))
        lines += ["", "Each row by itself:", *(cell["command"] for cell in of_target), ""]
    return "\n".join(lines).rstrip()


def _row(cell: Mapping[str, Any]) -> tuple[str, ...]:
    asked = (cell["model"].removeprefix("hf:"), cell["way"], f"{cell['seq_len']:,}")
    if not cell["batch_size"]:
        return (*asked, tell_need(cell["message"] or ""), *[""] * (len(_COLUMNS) - 1))
    return (
        *asked,
        f"{cell['batch_size']:,}",
        f"{cell['peak_bytes'] / 2**20:,.0f}",
        format_number(cell["tokens_per_s"], ",.0f"),
        format_number(cell["hours"], ",.1f"),
        format_number(cell["price"], ",.2f", ""),
    )


def tell_need(message: str) -> str:
    """Return what one sample needs, from the sentence that refuses it; else the sentence."""
    need = message.partition(" needs ")[2].partition(" for ")[0]
    return f"needs {need}" if need else message


def tell_markdown(cells: Iterable[Mapping[str, Any]]) -> list[str]:
    """Return the rows as those of a table in Markdown."""
    return ["| " + " | ".join(_row(cell)) + " |" for cell in cells]
