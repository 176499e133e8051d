"""Files that a crash never leaves half written: whole ones by rename, lines of JSON one at a time; a full disk is a sentence."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from segue.errors import DiskFailed, UserError


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Turn a full or unwritable disk under `path`, or a folder that went away, into a `DiskFailed` of one sentence; other errors
    pass."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            why, remedy, again = "the disk is full", "free some space there", " and go on with --resume"
        elif error.errno == errno.EFBIG:
            why, remedy, again = "a file would exceed the limit on file sizes", "raise it (ulimit -f)", " and go on with --resume"
        elif error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
            why, remedy, again = "writing there is not allowed", "make it writable", " and go on with --resume"
        elif error.errno == errno.EIO:
            why, remedy, again = "the disk reports an error", "look after it", " and go on with --resume on a copy"
        elif error.errno == errno.ENOENT and not path.parent.exists():
            raise DiskFailed(f"{path.parent} is gone: it was removed or moved while it was being written to", "") from error
        else:
            raise
        raise DiskFailed(f"{path} could not be written because {why}: {remedy}", again) from error


def plain(value: Any) -> Any:
    """`value` as JSON can hold it: numbers that are not finite become null, and mappings, lists and tuples plain ones."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_atomic(path: Path, data: bytes) -> None:
    """Write a file so that a reader sees the old content or the new, never a part. Raises `DiskFailed` on a full disk."""
    with disk_errors(path):
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.chmod(temporary, 0o644)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)
            raise


def write_json(path: Path, value: Any) -> None:
    """`write_atomic` of a JSON document; numbers that are not finite become null."""
    write_atomic(path, (json.dumps(plain(value), indent=2, allow_nan=False) + "\n").encode())


def read_jsonl(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a JSON-lines file; a torn last line (no newline, after a crash) is left out, a missing file empty.

    Raises `UserError` for a file that cannot be read, and a line that is no object."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}): make it a file that can be.") from None
    lines: list[dict[str, Any]] = []
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), 1):
        try:
            parsed = json.loads(line)
        except (ValueError, RecursionError):
            parsed = None
        if not isinstance(parsed, dict):
            raise UserError(f"Line {number} of {path} is no JSON object: restore the file or remove that line.")
        lines.append(parsed)
    return lines


class JsonLines:
    """Appends one JSON object per line and flushes each. A torn last line is cut before the first append."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with disk_errors(path):
            self._file: IO[bytes] = open(path, "ab")  # noqa: SIM115 - closed by `close`
            end = _whole_lines(path)
            if end < self._file.tell():
                self._file.truncate(end)

    def append(self, record: dict[str, Any]) -> None:
        """Raises `DiskFailed` on a full disk."""
        line = json.dumps(plain(record), allow_nan=False) + "\n"
        with disk_errors(self.path):
            self._file.write(line.encode())
            self._file.flush()

    def close(self) -> None:
        with disk_errors(self.path):
            self._file.close()

    def __enter__(self) -> JsonLines:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _whole_lines(path: Path) -> int:
    """How many bytes of a file are whole lines."""
    data = path.read_bytes()
    return data.rfind(b"\n") + 1
