"""Messages of other programs: cut and escaped to be stored, and whether memory ran out."""

import errno
import re
from collections.abc import Mapping, Sequence
from typing import Any

LIMIT = 2_000
"""The number of characters kept of a message, from its beginning."""

KIND_LIMIT = 200
"""The number of characters kept of an exception's type."""


def shorten(text: str, limit: int = LIMIT) -> str:
    """Return the beginning of a message, with its full length if it is cut."""
    if len(text) <= limit:
        return escape(text)
    return f"{escape(text[:limit])} ... ({len(text):,} characters)"


def escape(text: str) -> str:
    r"""Return a text with lone surrogates, which have no encoding, spelled as ``\ud800``."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


def escape_all(value: Any) -> Any:
    """Return a value of mappings and lists with every text escaped, including keys."""
    if isinstance(value, str):
        return escape(value)
    if isinstance(value, Mapping):
        return {escape_all(key): escape_all(part) for key, part in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, bytes):
        return [escape_all(part) for part in value]
    return value


_OUT_OF_MEMORY = re.compile(
    r"out[ _]of[ _]memory|can't allocate memory|cannot allocate memory|not enough memory"
    # cuBLAS, cuDNN, cuSOLVER, cuSPARSE and cuRAND, each in its own spelling.
    r"|std::bad_alloc|\w_ALLOC(?:ATION)?_FAILED"
    # cuBLAS allocates its workspace when it starts.
    r"|CUBLAS_STATUS_NOT_INITIALIZED\b.*\bcublasCreate",
    re.IGNORECASE | re.DOTALL,
)
_UNDER_A_LIMIT = re.compile(r"could not (?:create|execute) a (?:primitive|memory)(?! descriptor)")
"""oneDNN's message for every failed allocation; it has other causes too."""

_REQUESTED = re.compile(r"tried to allocate ([\d.]+) ?(bytes|KiB|MiB|GiB|TiB)", re.IGNORECASE)
_UNITS = {"bytes": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}


def is_out_of_memory(error: BaseException, *, limited: bool = False) -> bool:
    """Return whether an error means that memory ran out, by its type or else its message.

    ``limited`` is whether the process has a memory limit.
    """
    if isinstance(error, MemoryError):
        return True
    if isinstance(error, OSError) and error.errno == errno.ENOMEM:
        return True
    return isinstance(error, RuntimeError | ImportError | OSError) and says_out_of_memory(
        str(error), limited=limited
    )


def says_out_of_memory(text: str, *, limited: bool = False) -> bool:
    """Return whether a library's message means that memory ran out."""
    return bool(_OUT_OF_MEMORY.search(text) or (limited and _UNDER_A_LIMIT.search(text)))


def requested_bytes(message: str) -> int | None:
    """Return the size of the failed allocation in an allocator's message."""
    match = _REQUESTED.search(message)
    return int(float(match.group(1)) * _UNITS[match.group(2).lower()]) if match else None
