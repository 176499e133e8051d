"""vLLM's processes end with the one that started them: by themselves they may go on for a minute, holding memory and a core."""

from __future__ import annotations

import os
import select
import signal
import threading


def end_with_parent() -> None:
    """Kill this process as soon as its parent is gone. A thread waits for that; nothing is polled."""
    try:
        parent = os.pidfd_open(os.getppid())
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return
    threading.Thread(target=_wait, args=(parent,), name="segue-lifeline", daemon=True).start()


def _wait(parent: int) -> None:
    poll = select.poll()
    poll.register(parent, select.POLLIN)
    poll.poll()
    os.kill(os.getpid(), signal.SIGKILL)
