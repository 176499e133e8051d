"""Linux process facts: ending with one's parent, adopting orphans, ending a family of processes and nothing else."""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def _prctl(option: int, value: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl failed")


def adopt_orphans(yes: bool = True) -> None:
    """Descendants whose parents die become children of this process, so that none can escape `end_family`."""
    _prctl(_PR_SET_CHILD_SUBREAPER, int(yes))


def die_with_parent(parent: int) -> None:
    """SIGKILL for this process as soon as `parent` ends, or has ended. Its children must end with it by themselves."""
    _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def end_with_parent(parent: int, last: Callable[[], None] = lambda: None) -> None:
    """When `parent` ends, end all descendants of this process, call `last`, and exit: at once if it has ended already.

    A thread waits for it, because the main thread may be stuck in what it does; and a signal would reach this process only.
    """
    adopt_orphans()
    try:
        pidfd = os.pidfd_open(parent)
    except ProcessLookupError:
        _end(last)
    else:
        if os.getppid() != parent:  # it ended, and another process has its number now
            _end(last)
        threading.Thread(target=_end_after, args=(pidfd, last), name="parent", daemon=True).start()


def _end_after(pidfd: int, last: Callable[[], None]) -> None:
    select.select([pidfd], [], [])
    _end(last)


def _end(last: Callable[[], None]) -> None:
    end_family(grace_seconds=0.0)
    last()
    os._exit(1)


def block_sigterm() -> None:
    """From now on this thread, and what it starts, do not get SIGTERM: programs inherit what is blocked, and keep it blocked also
    where they install handlers, as Ray's do.

    A batch system that ends a job signals all of its processes at once. Only who stops the run in order is to hear it.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


@contextlib.contextmanager
def sigterm_blocked() -> Iterator[None]:
    """What starts in this block does not get SIGTERM (`block_sigterm`); this process does again afterwards."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def survive_sigterm() -> None:
    """From now on SIGTERM does nothing to this process, also where a library unblocks it, as the resource tracker of Python's
    multiprocessing does. A handler is not inherited, as SIG_IGN would be.

    From any thread: Python's `signal.signal` works on the main thread only, which in an asyncio actor of Ray's is never ours.
    """
    libc = ctypes.CDLL(None)
    libc.signal.argtypes = (ctypes.c_int, ctypes.c_void_p)
    libc.signal(signal.SIGTERM, ctypes.cast(libc.abs, ctypes.c_void_p))  # a function of one int that changes nothing


def unblock_sigterm() -> None:
    """What this thread starts gets SIGTERM again: it may be ended by it."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def output_to(path: Path) -> None:
    """Append to `path` from now on what this process and its children print, native libraries included."""
    sys.stdout.flush()
    sys.stderr.flush()
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    os.close(handle)


def end_family(grace_seconds: float, kill_seconds: float = 10.0) -> list[str]:
    """End all descendants of this process: SIGTERM, `grace_seconds`, SIGKILL; returns the names of those that had to be killed.

    Looks again after each round, because a dying process may have started another; gives up after `kill_seconds` of killing.
    """
    me = psutil.Process()
    killed: list[str] = []
    family = me.children(recursive=True)
    for process in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.terminate()
    psutil.wait_procs(family, timeout=grace_seconds)
    deadline = time.monotonic() + kill_seconds
    while time.monotonic() < deadline:
        left = [p for p in me.children(recursive=True) if _alive(p)]
        if not left:
            break
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                killed.append(process.name())
                process.kill()
        psutil.wait_procs(left, timeout=1.0)
    reap()
    return killed


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def reap() -> None:
    """Collect children that have ended (adopted ones included)."""
    while True:
        try:
            pid, _ = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return


def describe_exit(code: int) -> str:
    """ "exit code 3" or "signal SIGKILL", from a `Popen.returncode`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:
        return f"signal {-code}"
