"""Tables, numbers and notes as the commands print them."""

from collections.abc import Container, Iterable, Sequence

from dpprof.results.analysis.standings import DAGGER, DOUBLE_DAGGER, Marks


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
        DAGGER: f"{DAGGER} Not verified here to compute the right gradient; dpprof verify "
        "--output results/verify/<model>-<method>.json does.",
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
