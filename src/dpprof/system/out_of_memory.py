"""Distinguishes out-of-memory errors from other failures, by exception type and message."""

import errno
import re

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
