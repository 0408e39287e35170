"""Takes the sizes out of the description of a call, and puts others in."""

import json
import re
from collections.abc import Iterator, Sequence

_GAP = "#"
_NUMBER = re.compile(r"(?<=[\[ ])-?\d+(?=[,\]}])")
"""A whole number in JSON."""


def take_sizes(call: str) -> tuple[str, tuple[int, ...], list[int]]:
    """Return a description without sizes: lengths of lists of equal tensors, and whole numbers.

    Returns:
        The description, the lengths and the numbers.
    """
    call, lengths = _fold(call)
    return _NUMBER.sub(_GAP, call), lengths, [*map(int, _NUMBER.findall(call))]


def count_numbers(call: str) -> int:
    """Return how many whole numbers a description without sizes lacks."""
    return call.count(_GAP)


def put_sizes(call: str, lengths: Sequence[int], numbers: Iterator[int]) -> str:
    """Put sizes into a description from ``take_sizes``."""
    first, *others = call.split(_GAP)
    call = first + "".join(f"{next(numbers)}{text}" for text in others)
    return _unfold(call, lengths) if lengths else call


def _fold(call: str) -> tuple[str, tuple[int, ...]]:
    """Shorten each list of equal tensors in the description of a call to one, and count them."""
    # A list of tensors is the first argument, or follows another one.
    if '[[{"t"' not in call and ', [{"t"' not in call.partition("[{")[2]:
        return call, ()
    name, arguments, named = json.loads(call)
    lengths = []
    for index, value in enumerate(arguments):
        is_list = isinstance(value, list) and value and isinstance(value[0], dict)
        if is_list and all(item == value[0] for item in value):
            arguments[index] = {"each": value[0]}
            lengths.append(len(value))
    return json.dumps([name, arguments, named]), tuple(lengths)


def _unfold(call: str, lengths: Sequence[int]) -> str:
    name, arguments, named = json.loads(call)
    waiting = iter(lengths)
    for index, value in enumerate(arguments):
        if isinstance(value, dict) and "each" in value:
            arguments[index] = [value["each"]] * next(waiting)
    return json.dumps([name, arguments, named])
