"""Standard output that may go away, or that nobody reads any more: a run neither ends nor waits because of it.

What cannot be written at once is kept and tried again with the next line and at the end (`drain`); a terminal or pipe that is
gone is told once, to the log.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import select
import sys
import time
from collections.abc import Iterator
from typing import IO, cast

from segue.errors import RunFailed

PIECE = 512
"""Bytes per write: a pipe or terminal that has room at all has room for them (POSIX: a pipe takes as many in one piece)."""
KEPT = 1 << 20
"""Bytes kept for a reader that has paused; what is older is lost, and said to be in the log at the end."""

END_SECONDS = 10.0
"""How long a process's end waits for a reader of its last lines."""

log = logging.getLogger(__name__)


def open_missing_streams() -> None:
    """Standard streams that were closed by whoever started us (`>&-`) lead to /dev/null.

    Otherwise the next file or pipe that is opened would get their number, and be written to as if it were one.
    """
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest free number: this one
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w", closefd=False))  # noqa: SIM115 - open as long as the process lives


@contextlib.contextmanager
def written_to(out: IO[str]) -> Iterator[None]:
    """A block that does nothing but print to `out`, which it flushes: what cannot be written is a `RunFailed` of one sentence.

    A reader that has gone (`| head`) is none: `BrokenPipeError` passes.
    """
    try:
        yield
        out.flush()
    except BrokenPipeError:
        raise
    except OSError as error:
        with contextlib.suppress(OSError):  # what is left in the buffer would fail again when Python ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), out.fileno())
        raise RunFailed(
            "output",
            f"Standard output could not be written ({error.strerror}): free some space where it goes to, or send it elsewhere.",
        ) from error


class Console(io.TextIOBase):
    """Standard output as it is now (later redirections of file descriptor 1 do not concern it), written without waiting."""

    def __init__(self) -> None:
        with contextlib.suppress(OSError):
            sys.stdout.flush()
        self._encoding = sys.stdout.encoding or "utf-8"
        self._fd = os.dup(1)
        self._waiting = bytearray()
        self._gone = False
        self._lost = 0

    def write(self, text: str) -> int:
        if not self._gone:
            self._waiting += text.encode(self._encoding, "replace")
            self._pass_on(0.0)
        return len(text)

    def flush(self) -> None:
        """Nothing: what could be written is written already."""

    def drain(self, seconds: float) -> None:
        """Write what is left; gives up after `seconds` without a reader."""
        self._pass_on(seconds)
        if self._waiting:
            log.warning("nobody read the console's last %d bytes", len(self._waiting))
        if self._lost:
            log.warning("the console's reader came too late for %d bytes", self._lost)

    def _pass_on(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        try:
            while self._waiting and self._has_room(max(0.0, deadline - time.monotonic())):
                written = os.write(self._fd, self._waiting[:PIECE])
                del self._waiting[:written]
        except OSError as error:
            self._gone = True
            self._waiting.clear()
            log.warning("the console is gone (%s): nothing more is shown there", error.strerror)
        if len(self._waiting) > KEPT:
            end = self._waiting.find(b"\n", len(self._waiting) - KEPT) + 1
            self._lost += end
            del self._waiting[:end]

    def _has_room(self, seconds: float) -> bool:
        return bool(select.select([], [self._fd], [], seconds)[1])

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def fileno(self) -> int:
        return self._fd

    @property
    def encoding(self) -> str:  # type: ignore[override]  # TextIOBase has an attribute here
        return self._encoding


@contextlib.contextmanager
def surviving_stdout() -> Iterator[None]:
    """What is printed goes through a `Console` while the block runs."""
    console = Console()
    with contextlib.redirect_stdout(cast(IO[str], console)):
        yield
    console.drain(END_SECONDS)
