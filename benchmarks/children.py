"""A program that a benchmark runs and watches: its lines, its deadline, its end.

consumes       the program's output, line by line, stderr with stdout
produces       its exit code, whether it was late, its last lines
waits for      its end, at most `deadline` seconds, then `STOP_SECONDS` after a request to stop
unblocked by   the end of its output; the deadline; `stop`
on cancel      the program is told to stop at once and after `STOP_SECONDS` killed; it dies with this process, however that ends
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from segue.cluster.processes import die_with_parent

STOP_SECONDS = 60.0
LAST_LINES = 25
_running: set[subprocess.Popen[str]] = set()
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
        text=True,
        errors="replace",
        env=env,
        preexec_fn=lambda: die_with_parent(me),
    )
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
        assert child.stdout is not None
        for line in child.stdout:
            last = [*last, line.rstrip()][-LAST_LINES:]
            heard(child.pid, line)
        code = child.wait(STOP_SECONDS)
    finally:
        timer.cancel()
        if child.poll() is None:  # whatever happened here, leave nothing running
            _haste(child)
            _wait(child)
        _running.discard(child)
    return Ended(code, late.is_set(), last)


def stop() -> None:
    """Tell every program that runs, in any thread, to stop at once; `run` waits for it. May be called in a signal handler."""
    for child in list(_running):
        _haste(child)


def _haste(child: subprocess.Popen[str]) -> None:
    """Two signals: the supervisor of a run takes the first for a request to write a checkpoint before it ends its family, the
    second for haste. Nobody goes on with a run of a benchmark's."""
    child.send_signal(signal.SIGTERM)
    child.send_signal(signal.SIGINT)


def _wait(child: subprocess.Popen[str]) -> None:
    try:
        child.wait(STOP_SECONDS)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait(STOP_SECONDS)
