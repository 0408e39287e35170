"""The digest of the code that ran, even if files were edited meanwhile."""

from collections.abc import Callable
from pathlib import Path

from dpprof.planning.code_digest import file_digest, read_anew
from dpprof.system.console import say
from dpprof.system.files import sha256_hex


class CodeInUse:
    """Watches source files while they are in use.

    ``digest`` returns the files' digest at the time of the call; ``loaded`` is a module that
    this process has already imported.
    """

    def __init__(self, digest: Callable[[], str], loaded: str) -> None:
        self._digest, self._loaded = digest, Path(loaded)
        self._imported = self._read(self._digest_of_imported)
        self._at_start = ""

    def start(self) -> None:
        """Mark the moment from which files that are not yet imported may be read."""
        self._at_start = self._read(self._digest)

    def settle(self) -> str:
        """Return the digest of the code that ran.

        If files changed while they were in use, this is unknown. The result is then a digest that
        matches no code, so that the run counts as outdated.
        """
        imported, at_end = self._read(self._digest_of_imported), self._read(self._digest)
        if (imported, at_end) == (self._imported, self._at_start):
            return at_end
        say("code was edited while it was in use; this result counts as outdated")
        return sha256_hex(f"edited: {self._imported} {self._at_start} {imported} {at_end}")

    def _digest_of_imported(self) -> str:
        return file_digest(self._loaded)

    @staticmethod
    def _read(digest: Callable[[], str]) -> str:
        read_anew()
        try:
            return digest()
        except (OSError, SyntaxError, ValueError) as error:  # half-written or deleted
            return f"unreadable: {error}"
