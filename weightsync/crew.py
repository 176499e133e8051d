"""Threads that can be left behind. A collective, or a store whose far side is frozen, may block inside C++ for ever; the event
loop must not. Each piece of work gets a daemon thread of its own; whoever waits for it waits until a deadline, then goes on.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")

_log = logging.getLogger(__name__)


class Abandoned(Exception):
    """The work did not return by its deadline; its thread was left behind and what it still does is discarded."""


class Deadline:
    """A moment on the monotonic clock, for threads (they have no event loop to ask)."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds left, never negative."""
        return max(0.0, self._end - time.monotonic())

    def sooner(self, seconds: float) -> Deadline:
        """The deadline that is `seconds` earlier."""
        return Deadline(self.left() - seconds)

    def within(self, seconds: float) -> Deadline:
        """In `seconds` from now, but not after this deadline."""
        return Deadline(min(self.left(), seconds))


class Crew:
    """Starts such threads and remembers those that still run."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._running: dict[threading.Thread, Callable[[], None]] = {}
        self._lock = threading.Lock()

    async def run(self, work: Callable[[threading.Event], T], seconds: float) -> T:
        """The result of `work(left)` within `seconds`, or `Abandoned`.

        `left` is set as soon as nobody waits for the work any more (deadline, cancellation, `close`): the work looks at it
        between its steps and gives up.
        """
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        left = threading.Event()
        waited_for = True

        def settle(result: T | None, error: BaseException | None) -> None:
            if not waited_for or future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]

        def give_up() -> None:
            left.set()
            _call_in(loop, lambda: settle(None, Abandoned(f"{self._name} was closed")))

        def body() -> None:
            result: T | None = None
            error: BaseException | None = None
            try:
                if not left.is_set():
                    result = work(left)
            except BaseException as caught:  # handed to the waiter, whatever it is
                error = caught
            with self._lock:
                self._running.pop(threading.current_thread(), None)
            _call_in(loop, lambda: settle(result, error))

        thread = threading.Thread(target=body, name=self._name, daemon=True)
        with self._lock:
            self._running[thread] = give_up
        thread.start()
        try:
            done, _ = await asyncio.wait([future], timeout=seconds)
        finally:
            waited_for = False
            left.set()
        if not done:
            raise Abandoned(f"{self._name} did not return within {seconds:.1f} s")
        return future.result()

    def running(self) -> int:
        """Threads that have not returned, abandoned ones included."""
        with self._lock:
            return len(self._running)

    def close(self, seconds: float) -> int:
        """Tell all work to give up, wait `seconds` in all, and return how many threads still run.

        A thread that comes back from C++ while the interpreter shuts down aborts the process: exit only when this returned 0, or
        by `os._exit`.
        """
        deadline = Deadline(seconds)
        with self._lock:
            threads = dict(self._running)
        for give_up in threads.values():
            give_up()
        for thread in threads:
            thread.join(deadline.left())
        left_over = self.running()
        if left_over:
            _log.warning("%d thread(s) of %s are blocked outside Python and were left behind", left_over, self._name)
        return left_over


def _call_in(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        assert loop.is_closed()  # the waiter is gone with its loop: nobody is left to tell
