"""A child process's output: forwarded up to a limit, with its end kept for messages."""

import codecs
import contextlib
import os
import sys
import threading
from pathlib import Path
from typing import IO

HEAD_BYTES = 4 * 2**20
"""The bytes of a process's output that are forwarded immediately."""

TAIL_BYTES = 2**20
"""The bytes kept from the end of the output beyond that."""

_CHUNK_BYTES = 2**16
_PATIENCE_S = 5


class Sink:
    """The destination of output: a file or standard error. Writing never fails.

    It is unbuffered, so that no data is left to write after a full disk has refused once.
    """

    def __init__(self, path: Path | None) -> None:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("wb", buffering=0) if path else None

    def write(self, text: str) -> None:
        """Write a text as it is."""
        with contextlib.suppress(OSError, ValueError):
            if self._file is None:
                sys.stderr.write(text)
                sys.stderr.flush()
            else:
                self._file.write(text.encode(errors="replace"))

    def close(self) -> None:
        """Close the file, if there is one."""
        if self._file is not None:
            self._file.close()


class Output:
    """Forwards the output of one process, in memory of constant size.

    It closes the stream at its end.
    """

    def __init__(self, stream: IO[bytes], sink: Sink) -> None:
        self._sink = sink
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._end = bytearray()
        self._bytes = 0
        self._turn, self._finished = threading.Lock(), False
        self._thread = threading.Thread(target=self._follow, args=(stream,), daemon=True)
        self._thread.start()

    def _follow(self, stream: IO[bytes]) -> None:
        with stream:
            while chunk := os.read(stream.fileno(), _CHUNK_BYTES):
                with self._turn:
                    if self._finished:
                        return
                    room = max(0, HEAD_BYTES - self._bytes)
                    if room:
                        self._sink.write(self._decode(chunk[:room]))
                    self._bytes += len(chunk)
                    self._end += chunk
                    if len(self._end) > 2 * TAIL_BYTES:
                        del self._end[:-TAIL_BYTES]

    def finish(self) -> str:
        """Return the output's tail, after waiting a while for its end and forwarding the rest."""
        self._thread.join(timeout=_PATIENCE_S)
        with self._turn:
            self._finished = True
            beyond = max(0, self._bytes - HEAD_BYTES)
            kept = min(beyond, TAIL_BYTES)
            if beyond > kept:
                self._sink.write(
                    f"\ndpprof: {beyond - kept:,} bytes of output are left out here; dpprof keeps "
                    f"the first {HEAD_BYTES:,} and last {TAIL_BYTES:,} bytes of a process\n"
                )
            tail = bytes(self._end)
        if kept:
            self._sink.write(tail[-kept:].decode(errors="replace"))
        if tail and not tail.endswith(b"\n"):
            self._sink.write("\n")
        return tail[-TAIL_BYTES:].decode(errors="replace")
