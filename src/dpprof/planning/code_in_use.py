"""The code that something ran on, as one digest, also where somebody edited it meanwhile."""

from collections.abc import Callable
from pathlib import Path

from dpprof.planning.code_digest import file_digest, read_anew
from dpprof.system.console import say
from dpprof.system.files import sha256_hex


class CodeInUse:
    """Watches source files while they are in use.

    Args:
        digest: Digests them as they are; called anew each time.
        loaded: A module that this process has imported already, however long it waits.
    """

    def __init__(self, digest: Callable[[], str], loaded: str) -> None:
        self._digest, self._loaded = digest, Path(loaded)
        self._imported = self._read(self._digest_of_imported)
        self._at_start = ""

    def start(self) -> None:
        """Mark the moment from which files are read that were not imported before."""
        self._at_start = self._read(self._digest)

    def settle(self) -> str:
        """Return the digest of what ran.

        Where that cannot be told, because files changed while they were in use, it is the
        digest of no code, so that what ran counts as outdated whatever the files are now.
        """
        imported, at_end = self._read(self._digest_of_imported), self._read(self._digest)
        if (imported, at_end) == (self._imported, self._at_start):
            return at_end
        say("code was edited while it was in use; what it measured counts as outdated")
        return sha256_hex(f"edited: {self._imported} {self._at_start} {imported} {at_end}")

    def _digest_of_imported(self) -> str:
        return file_digest(self._loaded)

    @staticmethod
    def _read(digest: Callable[[], str]) -> str:
        read_anew()
        try:
            return digest()
        except (OSError, SyntaxError, ValueError) as error:  # half-written, or gone
            return f"unreadable: {error}"
