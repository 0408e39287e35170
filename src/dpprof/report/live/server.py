"""Serves the report and how the sweep stands, to browsers on this machine and nobody else."""

import json
import re
import sys
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from dpprof.report.live.builder import Builder
from dpprof.report.live.standing import Results, find_manifest
from dpprof.report.page.write import render_empty_page
from dpprof.spec.validation import InputError
from dpprof.system.console import say

ADDRESS = "127.0.0.1"

_HOST = re.compile(r"(127\.0\.0\.1|localhost)(:[0-9]{1,5})?", re.IGNORECASE | re.ASCII)
"""Hosts of requests that are meant for this server, any port, since SSH may forward another.

Another name that leads to 127.0.0.1 is one that a web page had its browser look up anew, to read
what is served here (DNS rebinding).
"""

_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": "frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""Of every answer; the page's own Content-Security-Policy, in the page, holds beside this."""

_FRESH_S = 1.0
"""For how long an answer serves all who ask, so that many tabs cost what one does."""


class Watch:
    """What is served of one results folder. It looks only when asked, and writes nothing.

    Args:
        root: The folder that holds ``results``.
        builder: What makes its pages.

    Raises:
        InputError: There is no folder ``results``, or no sweep was planned in it.
    """

    def __init__(self, root: Path, builder: Builder | None = None) -> None:
        find_manifest(root)
        self._builder = builder or Builder(root)
        self._results = Results(root)
        self._lock = threading.Lock()
        self._looked_s: float | None = None
        self._told: dict[str, Any] = {}

    def status(self) -> dict[str, Any]:
        """Return how the sweep stands, of what the page was made, and what is wrong."""
        with self._lock:
            return self._look()

    def page(self) -> bytes:
        """Return the page of the results so far; before it is made, one with the strip alone."""
        with self._lock:
            self._look()
            if self._builder.page is not None:
                return self._builder.page.html
        return render_empty_page({"version": None, "results": 0}).encode()

    def close(self) -> None:
        """End what makes pages."""
        with self._lock:
            self._builder.close()

    def _look(self) -> dict[str, Any]:
        now_s = time.monotonic()
        if self._looked_s is None or now_s - self._looked_s >= _FRESH_S:
            try:
                standing = self._results.look()
                self._builder.advance(standing)
                self._told = standing.told | {"problem": None}
            except (InputError, OSError) as error:
                self._told |= {"problem": str(error)}
            self._looked_s = time.monotonic()
        page = self._builder.page
        return self._told | {
            "page": page and {"version": page.version, "results": page.results},
            "page_problem": self._builder.problem,
        }


class _Handler(BaseHTTPRequestHandler):
    """Answers GET and HEAD on fixed paths; no path leads to a file."""

    server: "Server"
    timeout = 30
    default_request_version = "HTTP/1.0"  # so that every answer has headers
    error_content_type = "text/plain; charset=utf-8"
    error_message_format = "%(code)d %(message)s\n"

    def parse_request(self) -> bool:
        """Refuse what is not for this server, whatever its method, before it is looked at."""
        if not super().parse_request():
            return False
        hosts = self.headers.get_all("Host", [])
        if len(hosts) != 1 or not _HOST.fullmatch(hosts[0].strip()):
            told = f"the Host of a request must be {ADDRESS} or localhost"
            self.send_error(HTTPStatus.FORBIDDEN, told)
            return False
        if self.command not in {"GET", "HEAD"}:
            self.send_error(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD are allowed")
            return False
        return True

    def do_GET(self) -> None:
        """Answer with what is served at the path."""
        route = self.server.routes.get(self.path.partition("?")[0])
        if route is None:
            self.send_error(HTTPStatus.NOT_FOUND, f"there is only {', '.join(self.server.routes)}")
            return
        kind, make = route
        content = make()
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    do_HEAD = do_GET  # noqa: N815 (the name that http.server looks for)

    def end_headers(self) -> None:
        """Add what every answer says."""
        for name, value in _HEADERS.items():
            self.send_header(name, value)
        if self.status == HTTPStatus.METHOD_NOT_ALLOWED:
            self.send_header("Allow", "GET, HEAD")
        super().end_headers()

    def send_response(self, code: int, message: str | None = None) -> None:
        """Remember the status, by which headers differ."""
        self.status = code
        super().send_response(code, message)

    def version_string(self) -> str:
        """Return the server's name; which Python it runs on is nobody's business."""
        return "dpprof"

    def log_message(self, *_arguments: object) -> None:
        """Keep the terminal quiet."""


class Server(ThreadingHTTPServer):
    """Serves a folder's page and status on 127.0.0.1.

    Raises:
        OSError: The port is taken, or may not be used.
    """

    daemon_threads = True

    def __init__(self, watch: Watch, port: int) -> None:
        def tell() -> bytes:
            return json.dumps(watch.status(), allow_nan=False).encode()

        self.routes = {
            "/": ("text/html; charset=utf-8", watch.page),
            "/status.json": ("application/json", tell),
            "/favicon.ico": ("image/x-icon", bytes),  # browsers ask, and log what is not there
        }
        super().__init__((ADDRESS, port), _Handler)

    @property
    def url(self) -> str:
        """Where the page is."""
        return f"http://{ADDRESS}:{self.server_port}/"

    def handle_error(self, *_arguments: object) -> None:
        """Keep quiet about readers that go away while they are answered; tell what else fails."""
        error = sys.exception()
        if not isinstance(error, ConnectionError | TimeoutError):
            say(f"a request was not answered: {type(error).__name__}: {error}")
