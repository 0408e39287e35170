"""Writes the HTML report: one file that needs no network and refuses to use one."""

import base64
import functools
import gzip
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import vl_convert

from dpprof.results.analysis.selection import Tables
from dpprof.results.report.page.content import tell_contents
from dpprof.results.report.rendering.document import Document
from dpprof.system.console import printable, say
from dpprof.system.files import write_atomically
from dpprof.system.paths import TEMPLATES

LIMIT_BYTES = 5_000_000
"""The largest page; what would not fit is thinned, and the page says so."""

_FOLDER = TEMPLATES / "page"
_FIRST = ("text.js", "elements.js", "data.js")
"""The scripts that all others of the page need."""

_LAST = ("main.js",)
"""The script that needs all others."""

_LIVE = ("live.js",)
"""The script that a page has while the sweep runs."""


class SweepStatus(NamedTuple):
    """What a live page says of the sweep, in a strip on top."""

    is_live: bool
    """Whether the page loads itself again."""

    ended: int
    planned: int
    lines: tuple[str, ...]


def write_page(document: Document, tables: Tables, results: Path) -> None:
    """Write ``report.html`` into the folder ``results``, whose logs it quotes."""
    page = render_page(document.title, embed_contents(document, tables, results))
    size = len(page.encode())
    if size > LIMIT_BYTES:
        say(f"results/report.html has {size / 1e6:.1f} MB, thinned as far as it can be")
    write_atomically(results / "report.html", page)


def embed_contents(document: Document, tables: Tables, results: Path) -> str:
    """Return the content of the page, at the finest detail that fits."""
    room = LIMIT_BYTES - len(render_page(document.title, "").encode())
    for content in tell_contents(document, tables, results):
        embedded = embed(content)
        if len(embedded) <= room:
            break
    return embedded


def render_page(title: str, content: str, sweep: SweepStatus | None = None) -> str:
    """Return the page as HTML.

    Its Content-Security-Policy allows the scripts and the style in the page, by their hashes, and
    nothing else but pictures in the page: no network, no other script, no frame, no form.
    """
    scripts = [bundle_charts(), read_scripts()]
    if sweep is not None and sweep.is_live:
        scripts.insert(0, _join(_LIVE))
    style = (_FOLDER / "page.css").read_text(encoding="utf-8")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER), undefined=jinja2.StrictUndefined, autoescape=True
    )
    environment.filters["printable"] = printable
    allowed = " ".join(map(_hash, scripts))
    return environment.get_template("page.html.j2").render(
        title=title,
        policy=(
            f"default-src 'none'; script-src {allowed}; style-src {_hash(style)}; "
            "img-src data:; base-uri 'none'; form-action 'none'"
        ),
        style=style,
        content=content,
        sweep=sweep,
        scripts=scripts,
    )


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def embed(value: Any) -> str:
    """Return a value as JSON, compressed, in letters that HTML reads as text.

    Raises:
        ValueError: A number is not finite.
    """
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


@functools.cache
def bundle_charts() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script; it takes some seconds to make."""
    bundle: str = vl_convert.javascript_bundle()  # type: ignore[call-arg]  # its stub lacks the default
    return _check(bundle)


@functools.cache
def read_scripts() -> str:
    """Return the page's own script."""
    apart = {*_FIRST, *_LAST, *_LIVE}
    views = sorted(path.name for path in _FOLDER.glob("*.js") if path.name not in apart)
    return _join([*_FIRST, *views, *_LAST])


def _join(names: Iterable[str]) -> str:
    parts = [(_FOLDER / name).read_text(encoding="utf-8") for name in names]
    return _check('"use strict";\n(async () => {\n' + "\n".join(parts) + "})();\n")


def _check(script: str) -> str:
    """Return a script that an HTML parser reads to its end."""
    if any(mark in script.lower() for mark in ("</script", "<script", "<!--")):
        raise ValueError("a script of the page holds a mark that would end it")
    return script
