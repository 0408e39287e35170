"""Writes the HTML report: one file that needs no network and refuses to use one."""

import base64
import functools
import gzip
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import markupsafe
import vl_convert

from dpprof.results.analysis.selection import Tables
from dpprof.results.analysis.tables.axes import AXES, RUN_KEY, name_speed
from dpprof.results.analysis.tables.frames import rows_of
from dpprof.results.report.page import data
from dpprof.results.report.rendering.document import Document
from dpprof.results.report.rendering.templates import make_environment
from dpprof.system.console import say
from dpprof.system.files import write_atomically
from dpprof.system.paths import TEMPLATES

LIMIT_BYTES = 5_000_000  # the largest page; what would not fit is thinned, and the page says so

_FOLDER = TEMPLATES / "page"


class Detail(NamedTuple):
    """How much of a result set a page holds; None is everything."""

    instants: int | None = None
    """Parts into which a step is divided; of each the highest instant is kept."""

    holdings: int | None = None
    """How many holdings of a peak are kept; the smaller ones of a component are joined."""

    runs: int = 2_000
    """How many runs keep their timeline and their holdings; the result files of these are read."""

    rows: int | None = None  # how many rows a table keeps
    log_ends: int = 200  # how many failures keep the end of their log

    def tell(self, counts: Mapping[str, int], runs: int, logs: int) -> Iterator[str]:
        """Say what the page leaves out of tables, recorded steps and logs, and where it is."""
        if self.instants is not None:
            yield (
                f"A timeline keeps the highest instant of each of {self.instants} parts of a step; "
                "results/tables/timeline.csv has all."
            )
        if self.holdings is not None:
            yield (
                f"Of what is held at a peak, the largest {self.holdings} parts are here one by "
                "one, and the smaller ones of a component as one sum; dpprof explain has all."
            )
        if runs > self.runs:
            yield (
                f"Of {runs:,} recorded or predicted steps, {self.runs:,} of the largest "
                "settings have their timeline and holdings here; results/tables has all."
            )
        if logs > self.log_ends:
            yield (
                f"Of {logs:,} failures with a log the first {self.log_ends:,} have its end "
                "here; results/logs has all."
            )
        for name, rows in counts.items():
            if self.rows is not None and rows > self.rows:
                yield (
                    f"Of {rows:,} {name} this page has the first {self.rows:,}; "
                    "results/tables has all."
                )


DETAILS = (
    Detail(),
    Detail(instants=150, holdings=150),
    Detail(instants=60, holdings=40),
    Detail(instants=30, holdings=20, runs=500, rows=10_000, log_ends=50),
    Detail(instants=30, holdings=20, runs=50, rows=1_000, log_ends=5),
)
"""Details, the finest first; a page takes the first that fits."""


class SweepStatus(NamedTuple):
    """What a live page says of the sweep, in a strip on top."""

    is_live: bool  # whether the page loads itself again
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


def tell_contents(document: Document, tables: Tables, results: Path) -> Iterator[dict[str, Any]]:
    """Yield the contents of the page, each with less detail than the one before.

    It shows all of the document but the appendix, and reads logs and result files in ``results``.
    """
    root, folder = results.absolute().parent, results / "logs"
    experiments, failures = data.list_experiments(tables), data.list_failures(tables)
    peaks = data.list_peaks(tables, experiments)
    kernels, traces = data.list_kernels(tables)
    logs = failures["error_log"].dropna()
    quoted = logs[: DETAILS[0].log_ends].map(lambda log: data.read_end(root / log, folder))
    runs: list[data.Run] = [tuple(key) for key in peaks[RUN_KEY].itertuples(index=False)]
    first = runs[: DETAILS[0].runs]
    holdings = [data.read_holdings(root, run) for run in first]
    timeline = rows_of(tables, "timeline", first)
    frames = {
        "experiments": experiments,
        "peaks": peaks,
        "kernels": kernels,
        "traces": traces,
        "failures": failures,
    }
    counts = {name: len(frame) for name, frame in frames.items()}
    noise = tables["noise"]
    blocks = [block for section in document.sections for block in section.blocks]
    files = {b.name: results / "figures" / f"{b.name}.png" for b in blocks if b.kind == "picture"}
    whole = {
        "title": document.title,
        "question": document.question,
        "headline": list(document.headline),
        "sections": [section.model_dump(mode="json") for section in document.sections],
        "figures": {
            name: base64.b64encode(file.read_bytes()).decode()
            for name, file in files.items()
            if file.is_file()
        },
        "axes": [name for name in experiments if name in AXES and name != "method"],
        "trainings": data.pack_frame(data.list_trainings(tables)),
        "speed": name_speed(row for _, row in tables["advice"].iterrows()),
        "noise": data.pack_frame(noise[noise["chosen"].astype(bool)]),
        "style": data.tell_style(tables),
        "outcomes": data.pack_frame(tables["outcomes"]),
    }
    for detail in DETAILS:
        frames["failures"] = failures.assign(log_end=quoted[: detail.log_ends])
        yield {
            **whole,
            **{name: data.pack_frame(frame[: detail.rows]) for name, frame in frames.items()},
            "timelines": data.pack_timelines(timeline, first[: detail.runs], detail.instants),
            "holdings": data.pack_holdings(holdings[: detail.runs], detail.holdings),
            "thinned": list(detail.tell(counts, len(runs), len(logs))),
        }


def embed(value: Any) -> str:
    """Return a value as JSON, compressed, in letters that HTML reads as text.

    Raises:
        ValueError: A number is not finite.
    """
    text = json.dumps(value, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return base64.b64encode(gzip.compress(text.encode(), mtime=0)).decode()


def render_page(title: str, content: str, sweep: SweepStatus | None = None) -> str:
    """Return the page as HTML.

    Its Content-Security-Policy allows the scripts and the style in the page, by their hashes, and
    nothing else but pictures in the page: no network, no other script, no frame, no form.
    """
    live = [_join(["live.js"])] if sweep is not None and sweep.is_live else []
    scripts = [*live, bundle_charts(), read_scripts()]
    style = (_FOLDER / "page.css").read_text(encoding="utf-8")
    template = make_environment(markupsafe.escape).get_template("page/page.html.j2")
    return template.render(
        title=title,
        policy=(
            f"default-src 'none'; script-src {' '.join(map(_hash, scripts))}; style-src "
            f"{_hash(style)}; img-src data:; base-uri 'none'; form-action 'none'"
        ),
        style=style,
        content=content,
        sweep=sweep,
        scripts=scripts,
    )


def _hash(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


@functools.cache
def bundle_charts() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script; it takes some seconds to make."""
    bundle: str = vl_convert.javascript_bundle()  # type: ignore[call-arg]  # its stub lacks the default
    return _check(bundle)


@functools.cache
def read_scripts() -> str:
    """Return the page's own script."""
    first = ["text.js", "elements.js", "data.js"]  # which all others need
    views = sorted({path.name for path in _FOLDER.glob("*.js")} - {*first, "main.js", "live.js"})
    return _join([*first, *views, "main.js"])


def _join(names: Iterable[str]) -> str:
    parts = [(_FOLDER / name).read_text(encoding="utf-8") for name in names]
    return _check('"use strict";\n(async () => {\n' + "\n".join(parts) + "})();\n")


def _check(script: str) -> str:
    """Return a script that an HTML parser reads to its end."""
    if any(mark in script.lower() for mark in ("</script", "<script", "<!--")):
        raise ValueError("a script of the page holds a mark that would end it")
    return script
