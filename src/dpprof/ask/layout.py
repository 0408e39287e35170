"""Tables, numbers and notes as the commands print them."""

import textwrap
from collections.abc import Container, Iterable, Mapping, Sequence

from dpprof.results.analysis.standings import DAGGER, DOUBLE_DAGGER, Marks

WIDTH, LINES = 100, 20
"""The most letters of a line, and the most lines, of an answer without its details."""

_SHARES = {
    "measured": ("measured at this shape", "interpolated"),
    "extrapolated": ("extrapolated",),
    "data sheet": ("data sheet",),
}
"""What predicted times rest on, as an answer names it."""

_EXECUTIONS = {"graph": "CUDA graph"}


def fit_screen(before: Iterable[str], table: Sequence[str], after: Iterable[str]) -> str:
    """Return an answer that fits a screen: sentences, a table, and sentences.

    A sentence takes two lines at most, and rows before the last of a long table are left out; the
    details have them.
    """
    above, below = ([line for text in part for line in _wrap(text)] for part in (before, after))
    cut = [row if len(row) <= WIDTH else f"{row[: WIDTH - 3]}..." for row in table]
    room = LINES - len(above) - len(below)
    if len(cut) > room:
        hidden = len(cut) - room + 1
        cut = [*cut[: room - 2], f"... {hidden} more: --details", cut[-1]]
    return "\n".join([*above, *cut, *below])


def _wrap(text: str) -> list[str]:
    indent = text[: len(text) - len(text.lstrip())]
    return textwrap.wrap(
        text.strip(),
        WIDTH,
        max_lines=2,
        placeholder=" ... (--details)",
        initial_indent=indent,
        subsequent_indent=f"{indent}  ",
        break_on_hyphens=False,
    )


_UNSAID = ("default", "loop dpprof", "independent")


def name_settings(*settings: str) -> str:
    """Say with which numbers, which optimizer and how a step runs, as far as that is one."""
    return ", ".join(_EXECUTIONS.get(name, name) for name in settings if name not in _UNSAID)


def name_adapters(model: str, lora: str | None) -> str:
    """Say which adapters a model trains, unless its name does; empty where it has none."""
    if lora is None or "-lora" in model or model.endswith("-ia3"):
        return ""
    return " with IA3" if lora == "IA3" else f" with LoRA ({lora})"


def explain_trust(*bases: Mapping[str, float]) -> str:
    """Say in a line how far to trust an answer; ``bases`` are what predicted times rest on."""
    told = []
    for name, parts in _SHARES.items():
        shares = [sum(basis.get(part, 0.0) for part in parts) for basis in bases if basis]
        least, most = (f"{choose(shares, default=0.0):.0%}" for choose in (min, max))
        if most != "0%":
            told.append(f"{least if least == most else f'{least} to {most}'} {name}")
    times = f", times {', '.join(told)}" if told else ""
    return f"Predicted: peaks byte by byte{times} (--details)."


def lay_out(rows: Sequence[Sequence[str]], texts: Container[int] = (0,)) -> list[str]:
    """Return the lines of a table; the columns at ``texts`` are set flush left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(
            cell.ljust(width) if at in texts else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def explain_signs(signs: Marks) -> list[str]:
    """Return a line for each sign that a method bears."""
    meanings = {
        DAGGER: f"{DAGGER} Not verified to compute the right gradient; dpprof verify does that.",
        DOUBLE_DAGGER: f"{DOUBLE_DAGGER} Another mechanism than flat clipping; docs/methods.md.",
    }
    return [meanings[mark] for mark, methods in signs.items() if methods]


def group_messages(messages: Iterable[tuple[str, str | None]]) -> list[str]:
    """Return a line for each message, with the methods that it is about."""
    methods: dict[str, list[str]] = {}
    for method, message in messages:
        if message is not None and method not in methods.setdefault(message, []):
            methods[message].append(method)
    return [f"{', '.join(named)}: {message}" for message, named in methods.items()]


def format_number(value: float | None, form: str, otherwise: str = "unknown") -> str:
    """Return a number as text; another text where it is not known."""
    return otherwise if value is None else format(value, form)
