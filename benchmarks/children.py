"""A program that a benchmark runs and watches: its lines, its deadline, its end.

consumes       the program's output, line by line, stderr with stdout
produces       its exit code, whether it was late, its last lines
waits for      its end, at most `deadline` seconds, then `STOP_SECONDS` after a request to stop
unblocked by   its end, whoever else holds its output by then; the deadline; `stop`
on cancel      the program is told to stop at once and after `STOP_SECONDS` killed; it dies with this process, however that ends
"""

from __future__ import annotations

import codecs
import io
import os
import select
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from segue.cluster.processes import die_with_parent

STOP_SECONDS = 60.0
LAST_LINES = 25
_PIPE = 1 << 20
"""More than a pipe holds, unless root made it larger: one read takes all that is in it."""
_running: set[subprocess.Popen[bytes]] = set()
"""Of all threads. No lock: a signal handler reads it."""


class Ended(NamedTuple):
    """How it ended. `last`: its last lines."""

    code: int
    late: bool
    last: list[str]

    def why(self, deadline: float) -> str:
        """For a sentence about a run that failed."""
        return f"took longer than {deadline:g} s and was stopped" if self.late else f"failed with exit code {self.code}"


def run(
    command: Sequence[str],
    deadline: float,
    heard: Callable[[int, str], None] = lambda pid, line: None,
    env: Mapping[str, str] | None = None,
) -> Ended:
    """Run a program to its end. `heard(pid, line)` is told its process and each line it prints; what it raises ends both."""
    me = os.getpid()
    child = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        bufsize=0,
        env=env,
        preexec_fn=lambda: die_with_parent(me),
    )
    output, end = child.stdout, os.pidfd_open(child.pid)  # at once: it must not have been waited for
    assert output is not None
    late = threading.Event()

    def expire() -> None:
        late.set()
        child.terminate()
        _wait(child)

    timer = threading.Timer(deadline, expire)
    timer.daemon = True
    last: list[str] = []
    try:
        _running.add(child)
        timer.start()
        for line in _lines(output.fileno(), end):
            last = [*last, line.rstrip()][-LAST_LINES:]
            heard(child.pid, line)
        code = child.wait(deadline + 3 * STOP_SECONDS)  # it may go on without its output; `expire` sees to its end
    finally:
        timer.cancel()
        if child.poll() is None:  # whatever happened here, leave nothing running
            _haste(child)
            _wait(child)
        _running.discard(child)
        os.close(end)
        output.close()
    return Ended(code, late.is_set(), last)


def _lines(output: int, end: int) -> Iterator[str]:
    """What a program prints, until it closes its `output` or has ended, which the pidfd `end` tells. Whatever it left behind may
    hold the pipe open for ever."""
    text = io.IncrementalNewlineDecoder(codecs.getincrementaldecoder("utf-8")("replace"), translate=True)
    rest, ended = "", False
    while not ended:
        ended = end in select.select([output, end], [], [])[0]
        there, _, _ = select.select([output], [], [], 0.0)  # anew: its last words may have come between the two
        piece = os.read(output, _PIPE) if there else b""
        ended = ended or not piece
        *lines, rest = (rest + text.decode(piece, final=ended)).split("\n")
        yield from (f"{line}\n" for line in lines)
    if rest:
        yield rest


def stop() -> None:
    """Tell every program that runs, in any thread, to stop at once; `run` waits for it. May be called in a signal handler."""
    for child in list(_running):
        _haste(child)


def _haste(child: subprocess.Popen[bytes]) -> None:
    """Two signals: the supervisor of a run takes the first for a request to write a checkpoint before it ends its family, the
    second for haste. Nobody goes on with a run of a benchmark's."""
    child.send_signal(signal.SIGTERM)
    child.send_signal(signal.SIGINT)


def _wait(child: subprocess.Popen[bytes]) -> None:
    try:
        child.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait(STOP_SECONDS)
