"""Damages files that runs, planning and tables leave: cut, flipped, retyped, injected, forged."""

import csv
import hashlib
import io
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

MARK = "pwned"
"""Every text that is put into a file has it, so that it is found again where it does harm."""

INJECTIONS = [
    f"<{MARK} onload={MARK}()>",
    f"</script><{MARK}><!--",
    f'"><{MARK}>',
    f"\\{MARK}{{}}",
    f"^^5c{MARK}",
    f"$\\{MARK}$ % & ~ _ ^",
    f"$(touch {MARK})",
    f"`touch {MARK}`",
    f"'; touch {MARK}; '",
    f"[{MARK}](javascript:{MARK})",
    f"![{MARK}](http://{MARK}.invalid)",
    f"#{MARK}[]",
    f"{{{{ {MARK} }}}}<< {MARK} >><% {MARK} %>",
    f"../../{MARK}",
    f"/{MARK}",
    f"..\\{MARK}",
    f"{MARK}\x00",
    f"\x1b]0;{MARK}\x07\x1b[2J",
    f"\u202e{MARK}",
    f"\ud800{MARK}",
    f"{MARK}\n# {MARK}\n| {MARK} |\n",
    f"=cmd|{MARK}",
    f"{MARK} " * 20_000,
]
TEXTS = [*INJECTIONS, "", " ", "nan", "null", "1", "-1", "ok", "cpu", "standard", "True"]
TERMS = ["step", "forward", "gemm", "noise", "ok", "oom", "killed", "cpu", "standard", "flash"]
NUMBERS = [0, 1, -1, 3, 0.5, -0.5, 1e308, -1e308, 1e30, -1e30, 1e-300, 5e-324, True, False]
NUMBERS += [2**31, 2**53 + 1, 2**63 - 1, 2**63, -(2**63), 2**64, 10**30, 10**400]
NUMBERS += [float("nan"), float("inf"), float("-inf")]
OTHERS: list[Any] = [None, [], {}, [[]], {"": 0}, [None], {"a": {"b": [1]}}, [0] * 10_000]

_RAW = {
    "@deep lists@": "[" * 100_000 + "]" * 100_000,
    "@deep mappings@": '{"a":' * 30_000 + "1" + "}" * 30_000,
    "@cut lists@": "[" * 100_000,
    "@digits@": "9" * 10_000,
    "@surrogate@": '"\\ud800"',
    "@large@": "1e999",
}
"""What Python's JSON does not write."""

Place = tuple[Any, Any]
"""A mapping or a list, and a key or an index in it."""


def damage(content: bytes, kind: str, draw: random.Random) -> bytes:
    """Return a damaged version of a file's content.

    ``kind`` is its ending. A forged record has a content digest that fits what was put into it.
    """
    change = draw.choice([*[_BY_KIND.get(kind, _damage_text)] * 4, _damage_bytes])
    return change(content, draw)


def _damage_bytes(content: bytes, draw: random.Random) -> bytes:
    """Cut, flip bits, leave out, repeat, or replace all."""
    at = draw.randrange(len(content) + 1)
    flipped = bytearray(content)
    for _ in range(draw.randrange(1, 5) if content else 0):
        flipped[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    bad = [b"\x00", b"\xff\xfe", b"\r\n", b",", b'"', b"}", b"\xef\xbb\xbf", b"9" * 5_000]
    whole = [b"", b"\x00" * 100, b"null", b"[]", b"{}", b"1", b"\xff", b"a\n" * 1000]
    return draw.choice(
        [
            content[:at],
            bytes(flipped),
            content[:at] + content[at + draw.randrange(1, 20) :],
            content[:at] + draw.choice(bad) + content[at:],
            content * draw.choice([2, 50]),
            draw.choice(whole),
        ]
    )


def _damage_json(content: bytes, draw: random.Random) -> bytes:
    """Change one to three values of a document, and mostly forge its digest."""
    document = json.loads(content)
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        places = list(_list_places(document))
        if places:
            _change(*draw.choice(places), draw)
    if isinstance(document, dict) and "content_digest" in document and draw.random() < 0.8:
        forge(document)
    text = json.dumps(document, indent=draw.choice([None, 1]))
    for token, raw in _RAW.items():
        text = text.replace(f'"{token}"', raw)
    return text.encode()


def forge(document: dict[str, Any]) -> None:
    """Give a record the content digest of what it holds now."""
    rest = {key: value for key, value in document.items() if key != "content_digest"}
    spelled = json.dumps(rest, sort_keys=True, separators=(",", ":"))
    document["content_digest"] = hashlib.sha256(spelled.encode()).hexdigest()


def _list_places(value: Any) -> Iterator[Place]:
    """List every place in a document."""
    inner = value.items() if isinstance(value, dict) else enumerate(value)
    for key, below in inner:
        yield value, key
        if isinstance(below, dict | list):
            yield from _list_places(below)


def _change(parent: Any, key: Any, draw: random.Random) -> None:
    """Leave out, add or replace the value at a place; mostly by one that passes for it."""
    how = draw.randrange(10)
    if how == 0:
        del parent[key]
    elif how == 1:
        if isinstance(parent, dict):
            parent[draw.choice([*INJECTIONS, "extra", "schema_version"])] = parent[key]
        else:
            parent.insert(key, parent[key])
    elif how == 2:
        parent[key] = draw.choice([*TEXTS, *NUMBERS, *OTHERS, *_RAW])
    else:
        parent[key] = _pass_for(parent[key], draw)


def _pass_for(value: Any, draw: random.Random) -> Any:
    """Draw another value of the same type."""
    whole = [one for one in NUMBERS if isinstance(one, int)]
    scalars = {str: [*INJECTIONS, *TERMS], bool: [True, False], int: whole, float: NUMBERS}
    if type(value) in scalars:
        return draw.choice(scalars[type(value)])
    if isinstance(value, list):
        return draw.choice([[], value * 2, value[:-1], value[::-1]])
    if isinstance(value, dict):
        kept = draw.sample(sorted(value), draw.randrange(len(value) + 1))
        return {draw.choice([name, name, *INJECTIONS[:5]]): value[name] for name in kept}
    return draw.choice([0, 1.5, "x", []])


def _damage_lines(content: bytes, draw: random.Random) -> bytes:
    """Damage one line of JSON of several, repeat lines, or leave some out."""
    lines = content.splitlines(keepends=True)
    at = draw.randrange(len(lines))
    how = draw.randrange(4)
    if how == 0:
        del lines[at]
    elif how == 1:
        lines.insert(at, draw.choice([b"[]\n", b"null\n", b"{}\n", b"\xff\n", b"x\n", b"\n"]))
    else:
        lines[at] = _damage_json(lines[at].rstrip(b"\n"), draw) + b"\n"
    return b"".join(lines)


def _damage_table(content: bytes, draw: random.Random) -> bytes:
    """Change cells, the header, or rows of a CSV file."""
    rows = list(csv.reader(io.StringIO(content.decode())))
    how = draw.randrange(8)
    column = draw.randrange(len(rows[0]))
    if how == 0:
        for row in rows:
            del row[column]
    elif how == 1:
        rows[0][column] = draw.choice([*TEXTS[:8], rows[0][0], "extra"])
    elif how == 2:
        rows.insert(draw.randrange(len(rows) + 1), [draw.choice(INJECTIONS)] * draw.choice([1, 9]))
    elif how == 3:
        rows[1:] = rows[1:] * draw.choice([0, 2])
    else:
        for _ in range(draw.choice([1, 1, 3])):
            row = draw.choice(rows[1:] or rows)
            odd = draw.choice([*INJECTIONS, *TEXTS, *map(str, NUMBERS), *map(str, OTHERS[:4])])
            row[draw.randrange(len(row))] = odd
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue().encode(errors="surrogatepass")


def _damage_text(content: bytes, draw: random.Random) -> bytes:
    """Put an injection, or a value that is not meant, into a short text."""
    odd = draw.choice([*INJECTIONS, *TEXTS, *map(str, NUMBERS), "[" * 10_000, "a: 1\na: 2"])
    at = draw.randrange(len(content) + 1)
    return draw.choice([b"", content[:at]]) + odd.encode(errors="surrogatepass") + content[at:]


_BY_KIND: dict[str, Callable[[bytes, random.Random], bytes]] = {
    ".json": _damage_json,
    ".jsonl": _damage_lines,
    ".csv": _damage_table,
}
"""Files of other kinds have a short text."""


def displace(path: Path, how: int) -> None:
    """Put something else in place of a file: nothing, a folder, or a link."""
    path.unlink()
    if how == 1:
        path.mkdir()
    elif how > 1:
        path.symlink_to(["nowhere/at/all", path.name, "/dev/null"][how - 2])
