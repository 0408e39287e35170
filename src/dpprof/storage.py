"""Files that are either whole or not there, and JSON that has one spelling."""

import contextlib
import errno
import hashlib
import json
import os
import tempfile
from pathlib import Path
from typing import Any


def canonical_json(value: Any) -> str:
    """Spell a JSON value in exactly one way: sorted keys, no spaces, no NaN."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )


def sha256_hex(text: str) -> str:
    """Return the sha256 of a text's UTF-8 bytes as 64 hex digits."""
    return hashlib.sha256(text.encode()).hexdigest()


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace a file as a whole: a reader sees the old content or the new, never a part.

    The bytes are on disk (fsync) before the name changes, so a crash or a full
    disk leaves the previous file.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:100]}.")
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            Path(temporary).unlink()
        raise


def check_writable(path: Path) -> None:
    """Make sure that a file can be written, before the work that will fill it.

    Raises:
        OSError: It cannot; the message says why.
    """
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "is a folder, not a file to write", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path.parent):
        pass


def write_if_changed(path: Path, text: str) -> bool:
    """Write a file only where its content differs, so that its age means something.

    Returns:
        Whether the file was written.
    """
    with contextlib.suppress(FileNotFoundError, UnicodeDecodeError):
        if path.read_text(encoding="utf-8") == text:
            return False
    write_atomically(path, text)
    return True
