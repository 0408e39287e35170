"""Writes the HTML report: one file that needs no network and refuses to use one."""

import base64
import functools
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jinja2
import vl_convert

from dpprof.report.document import Document
from dpprof.report.page.content import tell_contents
from dpprof.report.page.data import Tables
from dpprof.system.console import say
from dpprof.system.files import write_atomically
from dpprof.system.paths import TEMPLATES

LIMIT_BYTES = 5_000_000
"""The largest page; what would not fit is thinned, and the page says so."""

_FOLDER = TEMPLATES / "page"
_SCRIPTS = (
    "text.js",
    "elements.js",
    "data.js",
    "table.js",
    "chart.js",
    "view.js",
    "answer.js",
    "tradeoff.js",
    "experiments.js",
    "difference.js",
    "step.js",
    "peaks.js",
    "kernels.js",
    "accuracy.js",
    "compare.js",
    "outcomes.js",
    "main.js",
)
"""In the order in which the page needs them."""

_LIVE_SCRIPTS = ("text.js", "elements.js", "live.js")


def write_page(document: Document, tables: Tables, results: Path) -> None:
    """Write ``report.html`` into the folder ``results``, whose logs it quotes."""
    write_atomically(results / "report.html", make_page(document, tables, results))


def make_page(
    document: Document, tables: Tables, results: Path, live: dict[str, Any] | None = None
) -> str:
    """Return the page at the finest detail that fits; ``live`` as for ``render_page``."""
    for content in tell_contents(document, tables, results, LIMIT_BYTES):
        page = render_page(content, live)
        size = len(page.encode())
        if size <= LIMIT_BYTES:
            return page
    if live is None:
        say(f"results/report.html has {size / 1e6:.1f} MB, thinned as far as it can be")
    return page


def render_page(content: dict[str, Any], live: dict[str, Any] | None = None) -> str:
    """Return the page as HTML.

    Its Content-Security-Policy allows the scripts and the style in the page, by their hashes, and
    nothing else: no network, no other script, no frame, no form.

    ``live`` is what a page that ``dpprof watch`` serves says of itself. Such a page has a strip
    about the sweep on top, and may ask the address that it came from.
    """
    return _fill(content["title"], content, [bundle_charts(), read_scripts()], live)


def render_empty_page(live: dict[str, Any]) -> str:
    """Return a live page that has nothing but the strip, for the time before the first report."""
    return _fill("dpprof watch", None, [], live)


def _fill(title: str, content: Any, scripts: list[str], live: dict[str, Any] | None) -> str:
    styles = ["page.css"]
    if live is not None:
        scripts = [_read_live_script(), *scripts]
        styles.append("live.css")
    style = "".join((_FOLDER / name).read_text(encoding="utf-8") for name in styles)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_FOLDER), undefined=jinja2.StrictUndefined, autoescape=True
    )
    return environment.get_template("page.html.j2").render(
        title=title,
        policy=_make_policy(scripts, style, "" if live is None else "connect-src 'self'; "),
        style=style,
        content=embed_json(content),
        live=None if live is None else embed_json(live),
        scripts=scripts,
    )


def _make_policy(scripts: Iterable[str], style: str, more: str) -> str:
    allowed = " ".join(_hash(script) for script in scripts)
    return (
        f"default-src 'none'; script-src {allowed}; style-src {_hash(style)}; "
        f"{more}base-uri 'none'; form-action 'none'"
    )


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def embed_json(value: Any) -> str:
    r"""Return JSON for a script element, from which no text can break out.

    ``<``, ``>``, ``&`` and the separators U+2028 and U+2029 are written as ``\u003c`` and so on,
    so an HTML parser sees no end tag, no comment and no entity in it.

    Raises:
        ValueError: A number is not finite.

    Example:
        >>> embed_json({"message": "</script>"})
        '{"message":"\\u003c/script\\u003e"}'
    """
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


@functools.cache
def bundle_charts() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script; it takes some seconds to make."""
    bundle: str = vl_convert.javascript_bundle()  # type: ignore[call-arg]  # its stub lacks the default
    return _check(bundle)


@functools.cache
def read_scripts() -> str:
    """Return the page's own script."""
    return _join(_SCRIPTS)


@functools.cache
def _read_live_script() -> str:
    return _join(_LIVE_SCRIPTS)


def _join(names: Iterable[str]) -> str:
    parts = [(_FOLDER / name).read_text(encoding="utf-8") for name in names]
    return _check('"use strict";\n(() => {\n' + "\n".join(parts) + "})();\n")


def _check(script: str) -> str:
    """Return a script that an HTML parser reads to its end."""
    if any(mark in script.lower() for mark in ("</script", "<script", "<!--")):
        raise ValueError("a script of the page holds a mark that would end it")
    return script
