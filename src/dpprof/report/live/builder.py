"""Makes the report in a process of its own, of the lowest priority, while a sweep runs."""

import contextlib
import os
import subprocess
import sys
import time
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from dpprof.analysis.advice.budget import Planned
from dpprof.analysis.collection import collect
from dpprof.analysis.tables.build import build_tables
from dpprof.planning.artifacts import LIMITS, RESULTS
from dpprof.planning.planner import read_manifest
from dpprof.report.content import build_document
from dpprof.report.live.standing import Standing
from dpprof.report.page.write import make_page
from dpprof.system.files import canonical_json, sha256_hex
from dpprof.system.paths import PACKAGE

PAUSE_S = 10.0
"""The least time from one report to the next."""

SHARE = 0.1
"""The most of one core that making reports may take, on average."""

_START_S = 6.0
"""What the start of another process counts for."""

_NO_NOISE = (
    "the live page does not ask the accountants, which would wait for the sweep; the report that "
    "the sweep writes does"
)


class Page(NamedTuple):
    """A page, and what it was made of."""

    version: str
    results: int
    html: bytes


class Builder:
    """Makes pages, one after the other, while somebody calls ``advance``.

    Nothing waits: ``advance`` takes what is ready and starts what is due. It is not safe to call
    from several threads at once.
    """

    def __init__(self, root: Path, pause_s: float = PAUSE_S, share: float = SHARE) -> None:
        """``root`` is the folder that holds ``results``."""
        self.page: Page | None = None
        self.problem: str | None = None
        """Why the last attempt made no page."""

        self._root, self._pause_s, self._share = root, pause_s, share
        self._child: tuple[subprocess.Popen[bytes], Connection] | None = None
        self._asked: tuple[str, int] | None = None
        self._due_s = 0.0

    def advance(self, standing: Standing) -> None:
        """Take a page that is ready; start the next where results have changed and it is due."""
        self._receive()
        version = sha256_hex(canonical_json([standing.results, standing.others]))
        is_new = self.page is None or self.page.version != version
        if self._asked is None and is_new and time.monotonic() >= self._due_s:
            self._ask(version, standing)

    def close(self) -> None:
        """End the process."""
        if self._child is not None:
            process, connection = self._child
            process.kill()
            process.wait()
            connection.close()
            self._child = None

    def _ask(self, version: str, standing: Standing) -> None:
        if self._child is None:
            self._child = _start()
        self._asked = version, len(standing.results)
        live = {"version": version, "results": len(standing.results)}
        try:
            self._child[1].send((self._root, standing.manifest, live))
        except OSError as error:
            self._give_up(str(error))

    def _receive(self) -> None:
        if self._child is None or self._asked is None:
            return
        try:
            if not self._child[1].poll():
                return
            html, problem, busy_s = self._child[1].recv()
        except (EOFError, OSError):
            self._give_up("the process that makes it has ended; it is started again")
            return
        if html is not None:
            self.page = Page(*self._asked, html)
        self._settle(problem, busy_s)

    def _give_up(self, problem: str) -> None:
        self.close()
        self._settle(problem, _START_S)

    def _settle(self, problem: str | None, busy_s: float) -> None:
        self._due_s = time.monotonic() + max(self._pause_s, busy_s / self._share)
        self._asked, self.problem = None, problem


def _start() -> tuple[subprocess.Popen[bytes], Connection]:
    """Start a process that makes pages; it ends once the connection to it is closed."""
    here, there = Pipe()
    search_path = [str(PACKAGE.parent), os.environ.get("PYTHONPATH", "")]
    process = subprocess.Popen(
        [sys.executable, "-P", "-m", __name__, str(there.fileno())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        pass_fds=(there.fileno(),),
        start_new_session=True,  # Ctrl-C is for the parent, which ends this
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, search_path))},
    )
    there.close()
    return process, here


def main(connection: Connection) -> None:
    """Make a page for each request, until the other end is closed."""
    os.nice(19)
    with contextlib.suppress(EOFError, BrokenPipeError):
        while True:
            root, manifest, live = connection.recv()
            html, problem, since_s = None, None, time.process_time()
            try:
                html = build(root, manifest, live).encode()
            except Exception as error:  # noqa: BLE001 (whatever a file holds, watching goes on)
                problem = f"{type(error).__name__}: {error}"[:1000]
            connection.send((html, problem, time.process_time() - since_s))


def build(root: Path, manifest: Path, live: dict[str, Any]) -> str:
    """Return the page of the results that exist; write nothing.

    Results that cannot be trusted are left out and listed, as in a partial report.

    Args:
        root: The folder that holds ``results``.
        manifest: The list of runs.
        live: What the page is to say of itself.
    """
    planned = read_manifest(manifest)
    ceilings = sorted((root / RESULTS).glob(f"{LIMITS.pattern}.json"))
    collected = collect(planned, root, partial=True, ceilings=ceilings)
    noise = None if planned.privacy is None else Planned(planned.privacy, reason=_NO_NOISE)
    tables = build_tables(collected, noise)
    return make_page(build_document(tables, []), tables, root / RESULTS, live)


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
