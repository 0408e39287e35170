"""What a process prints: passed on while it is not too much, and its end remembered."""

import codecs
import contextlib
import os
import sys
import threading
from pathlib import Path
from typing import IO

HEAD_BYTES = 4 * 2**20
"""So much of a process's output is passed on as it comes."""

TAIL_BYTES = 2**20
"""Of what goes beyond that, so much is kept from the end."""

_CHUNK_BYTES = 2**16
_PATIENCE_S = 5


class Sink:
    """Where output goes: a file, or standard error. Writing never fails.

    Unbuffered, so that nothing is left to write when a full disk has refused once.
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
    """Follows what one process prints, in memory that does not grow with it.

    Args:
        stream: The reading end of its pipe; closed at the end.
        sink: Where it is passed on to.
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
                    self._take(chunk)

    def _take(self, chunk: bytes) -> None:
        room = max(0, HEAD_BYTES - self._bytes)
        if room:
            self._sink.write(self._decode(chunk[:room]))
        self._bytes += len(chunk)
        self._end += chunk
        if len(self._end) > 2 * TAIL_BYTES:
            del self._end[:-TAIL_BYTES]

    def finish(self) -> str:
        """Wait for the end of the output, for a while, pass on what is left, return its tail."""
        self._thread.join(timeout=_PATIENCE_S)
        with self._turn:
            self._finished = True
            beyond = max(0, self._bytes - HEAD_BYTES)
            kept = min(beyond, TAIL_BYTES)
            if beyond > kept:
                self._sink.write(
                    f"\ndpprof: {beyond - kept:,} bytes of output are left out here; a process's "
                    f"first {HEAD_BYTES:,} and last {TAIL_BYTES:,} are kept\n"
                )
            tail = bytes(self._end)
        if kept:
            self._sink.write(tail[-kept:].decode(errors="replace"))
        if tail and not tail.endswith(b"\n"):
            self._sink.write("\n")
        return tail[-TAIL_BYTES:].decode(errors="replace")
