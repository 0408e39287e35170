"""Atomic writes of files, and JSON with one spelling."""

import contextlib
import errno
import hashlib
import json
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO


def canonical_json(value: Any) -> str:
    """Return the only spelling of a JSON value: sorted keys, no spaces, no NaN."""
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )


def sha256_hex(text: str) -> str:
    """Return the sha256 of a text's UTF-8 bytes as 64 hex digits."""
    return hashlib.sha256(text.encode()).hexdigest()


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        ValueError: The file is not JSON, or dpprof cannot have written it: it was cut, is nested
            too deep, or holds a number larger than any measured or predicted one.
        OSError: The file cannot be read.
    """
    if path.exists() and not path.is_file():  # reading a pipe would wait for ever
        raise ValueError("it is not a file")
    text = path.read_text(encoding="utf-8")
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deep") from None
    except json.JSONDecodeError:
        raise
    except ValueError:  # Python reads no integer of more than 4,300 digits
        raise ValueError(_TOO_LARGE) from None
    if _MAYBE_LARGE.search(text) and _is_large(value):
        raise ValueError(_TOO_LARGE)
    return value


_TOO_LARGE = "it holds a number that is too large"
_MAYBE_LARGE = re.compile(r"[0-9]{19}|[0-9][eE]\+?[0-9]{2}")
"""Text that every large number contains; few files need a closer look."""

_LARGEST: dict[type, float] = {bool: 1, int: 2**63 - 1, float: 1e30}
"""What a column of a table holds, and what can still be multiplied and squared."""


def _is_large(value: Any) -> bool:
    """Return whether a number in a JSON value is too large to calculate with."""
    waiting = [value]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict | list):
            waiting += item.values() if isinstance(item, dict) else item
        elif isinstance(item, int | float) and abs(item) > _LARGEST[type(item)]:
            return True
    return False


def write_atomically(path: Path, content: str | bytes, *, durable: bool = True) -> None:
    """Write a file as a whole: a reader sees the old content or the new, never a part.

    The bytes are on disk (fsync) before the name changes, so a crash or a full disk leaves the
    previous file. A link stays, and its target is replaced.

    Without ``durable`` there is no fsync: a reader still sees no part of a file, but a crash of the
    machine may leave it empty. That is for files that are checked, and written again, before use.

    Raises:
        OSError: As ``check_writable``, or the disk is full; the message names the path.
    """
    with open_atomically(path, durable=durable) as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def open_atomically(path: Path, *, durable: bool = True) -> Iterator[BinaryIO]:
    """Open a file to write it part by part; it gets its name at the end, as a whole.

    If the block raises, the previous file stays.

    Raises:
        OSError: As ``write_atomically``.
    """
    file_path = _file_to_replace(path)
    _make_folder(file_path.parent)
    with _naming(path):
        descriptor, temporary = tempfile.mkstemp(
            dir=file_path.parent, prefix=f".{file_path.name[:100]}."
        )
    try:
        with _naming(path, temporary), os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            if durable:
                os.fsync(file.fileno())
        with _naming(path):
            Path(temporary).chmod(0o644)
            Path(temporary).replace(file_path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            Path(temporary).unlink()
        raise


def check_writable(path: Path) -> None:
    """Check that a file can be written, before the work that produces its content.

    Raises:
        OSError: The file cannot be created, or a folder, a device, a pipe or a broken link has
            its name. The message names the path.
    """
    file_path = _file_to_replace(path)
    _make_folder(file_path.parent)
    with _naming(path), tempfile.TemporaryFile(dir=file_path.parent):
        pass


def _file_to_replace(path: Path) -> Path:
    """Return the file that a write replaces, after following links: a regular file or none."""
    with _naming(path):
        try:
            mode = path.stat().st_mode
        except FileNotFoundError:
            if path.is_symlink():
                problem = "is a link to nothing, not a file to write"
                raise FileNotFoundError(errno.ENOENT, problem) from None
            return path
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, "is a folder, not a file to write")
        if not stat.S_ISREG(mode):
            raise OSError(errno.EINVAL, "is a device, a pipe or a socket, not a file to write")
        return path.resolve()


def _make_folder(folder: Path) -> None:
    """Create a folder and its parents; an error names the one that cannot be created."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        for path in (*reversed(folder.parents), folder):
            if path.is_symlink() and not path.exists():
                problem = "is a link to nothing, not a folder"
                raise NotADirectoryError(errno.ENOTDIR, problem, str(path)) from None
            if path.exists() and not path.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, "is not a folder", str(path)) from None
        raise


@contextlib.contextmanager
def _naming(path: Path, written: str | None = None) -> Iterator[None]:
    """Name the given path in errors that name another path, or none.

    With ``written``, errors that name another file than this one stay: they are not of the write.
    """
    try:
        yield
    except OSError as error:
        foreign = written is not None and error.filename not in (None, written)
        if error.errno is None or foreign:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from None


def write_if_changed(path: Path, text: str, *, durable: bool = True) -> bool:
    """Write a file only if its content differs, and return whether it was written.

    So its age shows when it last changed. ``durable`` is as for ``write_atomically``.

    Raises:
        OSError: As ``write_atomically``.
    """
    _file_to_replace(path)
    with contextlib.suppress(FileNotFoundError, UnicodeDecodeError):
        if path.read_text(encoding="utf-8") == text:
            return False
    write_atomically(path, text, durable=durable)
    return True
