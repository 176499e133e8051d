"""Time, and work that takes time. Shells ask the running event loop what time it is, so that a loop with a logical clock
(serial mode, virtual time) moves them all; heavy work goes through a `Compute`, so that the same code runs in a thread or inline.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import selectors
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


def now() -> float:
    """The running loop's time in seconds: monotonic in production, logical in serial mode."""
    return asyncio.get_running_loop().time()


class Compute(Protocol):
    """Where blocking work runs. `cost` is how many logical seconds it takes where time is logical; else it is ignored."""

    async def run(self, work: Callable[[], T], cost: float) -> T: ...

    def close(self) -> None: ...


class ThreadCompute:
    """One thread of its own: calls run one after another, the event loop stays free."""

    def __init__(self, name: str) -> None:
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    async def run(self, work: Callable[[], T], cost: float) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)


class LogicalCompute:
    """Runs the work at once, on the loop, and lets `cost` logical seconds pass. One call at a time, in order of arrival."""

    def __init__(self) -> None:
        self._turn = asyncio.Lock()

    async def run(self, work: Callable[[], T], cost: float) -> T:
        async with self._turn:
            result = work()
            await asyncio.sleep(cost)
            return result

    def close(self) -> None:
        pass


class Deadlock(RuntimeError):
    """Nothing is ready and nothing is timed: a logical clock would stand still for ever."""


class LogicalLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer as soon as nothing is ready. Deterministic: equal times run first-in
    first-out, which asyncio's own heap does not promise.

    It waits for no file descriptor and no thread: everything that runs on it must be in-process (a `LogicalCompute`, in-process
    peers). `_run_once` and `_ready` are asyncio's own internals (Python 3.11 to 3.13; tests/segue/test_clock.py pins them).
    """

    def __init__(self) -> None:
        super().__init__(selectors.SelectSelector())
        self._logical_now = 0.0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._order = itertools.count()

    def time(self) -> float:
        return self._logical_now

    def call_at(  # type: ignore[override]  # typeshed ties callback and args together with a TypeVarTuple
        self, when: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._order), handle))
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: Any = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._logical_now + delay, callback, *args, context=context)

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        pass  # a cancelled timer is dropped when its time comes

    def _run_once(self) -> None:
        ready = self._ready  # type: ignore[attr-defined]
        while not ready:
            if not self._timers:
                raise Deadlock("every task waits and no timer is armed")
            when, _, handle = heapq.heappop(self._timers)
            if handle.cancelled():
                continue
            self._logical_now = max(self._logical_now, when)
            ready.append(handle)
            while self._timers and self._timers[0][0] <= self._logical_now:
                _, _, due = heapq.heappop(self._timers)
                if not due.cancelled():
                    ready.append(due)
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()
