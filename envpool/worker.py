"""The worker process: `python -m envpool.worker PARENT_PID`, with its channel as standard input. It knows no torch and no Ray.

Two processes: a **guard**, which does nothing but wait, and its child, which hosts the environments, each in a thread of its
own so that blocking steps overlap. The guard ends with its child, with its parent (PDEATHSIG), or on SIGTERM, and then
ends everything that descends from it: the child's process group, and whoever left that group, because the guard is the one that
orphans fall to (PR_SET_CHILD_SUBREAPER). It keeps working when environment code holds the interpreter lock for ever, and it
leaves no zombies to a PID 1 that does not reap.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from typing import NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
_LINGER_SECONDS = 0.05
_WATCHED = {signal.SIGTERM, signal.SIGCHLD}


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def _children() -> list[int]:
    with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
        return [int(pid) for pid in file.read().split()]


def guard(parent: int) -> NoReturn:
    """Fork the host, wait for its end or the order to end it, and leave nothing behind."""
    signal.pthread_sigmask(signal.SIG_BLOCK, _WATCHED)
    _prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    if os.getppid() != parent:  # it died before PDEATHSIG was set
        os._exit(0)
    me = os.getpid()
    child = os.fork()
    if child == 0:
        _host(me)
    os.close(0)
    _watch(child)
    code = _end_descendants(child)
    os._exit(code if code >= 0 else 128 - code)


def _watch(child: int) -> None:
    """Until the child ends or SIGTERM comes. Reaps orphans, but not the child: its pid must go on naming its process group."""
    while signal.sigwait(_WATCHED) != signal.SIGTERM:
        while (dead := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
            if dead.si_pid == child:
                return
            os.waitpid(dead.si_pid, 0)


def _end_descendants(child: int) -> int:
    """Kill and reap until no one is left: those whose parents died become children of this process, and have their turn.

    Returns the child's exit code, negative if a signal ended it.
    """
    code = 0
    with contextlib.suppress(ProcessLookupError):  # it had not yet made its group
        os.killpg(child, signal.SIGKILL)
    while True:
        for pid in _children():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                if pid == child:
                    code = os.waitstatus_to_exitcode(status)
        except ChildProcessError:
            return code
        signal.sigtimedwait({signal.SIGCHLD}, _LINGER_SECONDS)


def _host(guard_pid: int) -> NoReturn:
    """The child: a process group of its own, ends with its guard, keeps the channel out of environments' reach, and serves."""
    os.setpgid(0, 0)  # a group, not a session: see `ProcessWorkers`
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _WATCHED)
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != guard_pid:
        os._exit(0)
    channel = os.dup(0)  # not inheritable by programs that environments start
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)  # whatever an environment prints goes to the log
    from envpool.host import Host

    code = 1
    try:
        Host(channel).serve()
        code = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        os._exit(code)


if __name__ == "__main__":
    guard(int(sys.argv[1]))
