"""Time, and work that takes time. Shells ask the running event loop what time it is, so that a loop with a logical clock
(serial mode, virtual time) moves them all; heavy work goes through a `Compute`, so that the same code runs in a thread or inline.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import selectors
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from contextvars import Context, copy_context
from typing import Any, Protocol, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


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


class _Handle(asyncio.Handle):
    """asyncio's, made and run without its debug mode, which nothing here uses."""

    __slots__ = ()

    def __init__(self, callback: Any, args: Any, loop: asyncio.AbstractEventLoop, context: Context | None) -> None:
        self._context = copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = None
        self._source_traceback = None


class _Timer(asyncio.TimerHandle):
    """The same for a timer. `_scheduled`: it is in the heap, where its cancellation is counted."""

    __slots__ = ()

    def __init__(self, when: float, callback: Any, args: Any, loop: LogicalLoop, context: Context | None) -> None:
        self._context = copy_context() if context is None else context
        self._loop = loop
        self._callback = callback
        self._args = args
        self._cancelled = False
        self._repr = None
        self._source_traceback = None
        self._when = when
        self._scheduled = True

    def cancel(self) -> None:
        if not self._cancelled:
            self._loop._timer_handle_cancelled(self)
            self._cancelled = True
            self._callback = self._args = None  # type: ignore[assignment]  # as asyncio does


class LogicalLoop(asyncio.SelectorEventLoop):
    """An event loop whose clock jumps to the next timer as soon as nothing is ready. Deterministic: equal times run first-in
    first-out, which asyncio's own heap does not promise.

    It waits for no file descriptor: what runs on it must be in-process (a `LogicalCompute`, in-process peers). Work given to
    `run_in_executor` is waited for with the clock standing still; a thread that nobody counts (`call_soon_threadsafe` from
    outside) does not hold the clock. Signal handlers of `add_signal_handler` run within `_ROUNDS_BETWEEN_LOOKS` rounds.

    `_run_once` and `_ready` are asyncio's own internals (Python 3.11 to 3.13; tests/segue/test_clock.py pins them).
    """

    _ROUNDS_BETWEEN_LOOKS = 256
    _FEW_TIMERS = 100

    def __init__(self) -> None:
        super().__init__(selectors.SelectSelector())
        self._logical_now = 0.0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._cancelled = 0
        self._order = itertools.count()
        self._outside = 0
        self._rounds = 0

    def time(self) -> float:
        return self._logical_now

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        self._check_closed()  # type: ignore[attr-defined]
        handle = _Timer(when, callback, args, self, context)
        heapq.heappush(self._timers, (when, next(self._order), handle))
        return handle

    def call_later(
        self, delay: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._logical_now + delay, callback, *args, context=context)

    def call_soon(self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None) -> asyncio.Handle:
        self._check_closed()  # type: ignore[attr-defined]
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)  # type: ignore[attr-defined]
        return handle

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Called by asyncio for every cancelled timer. A heap that is mostly cancelled timers is rebuilt without them."""
        if not handle._scheduled:  # type: ignore[attr-defined]
            return
        self._cancelled += 1
        if len(self._timers) > self._FEW_TIMERS and self._cancelled > len(self._timers) // 2:
            self._timers = [timer for timer in self._timers if not timer[2].cancelled()]
            heapq.heapify(self._timers)
            self._cancelled = 1  # `handle` itself: asyncio tells us before it marks it

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        future = super().run_in_executor(executor, func, *args)
        self._outside += 1
        future.add_done_callback(self._came_back)
        return future

    def _came_back(self, _: asyncio.Future[Any]) -> None:
        self._outside -= 1

    async def shutdown_default_executor(self, *args: Any) -> None:
        self._outside += 1
        try:
            await super().shutdown_default_executor(*args)
        finally:
            self._outside -= 1

    def _run_once(self) -> None:
        ready = self._ready  # type: ignore[attr-defined]
        self._rounds += 1
        if self._rounds == self._ROUNDS_BETWEEN_LOOKS:
            self._rounds = 0
            self._look_outside(0)
        while not ready and not self._stopping:  # type: ignore[attr-defined]
            if self._outside:
                self._look_outside(None)
            else:
                self._jump()
        if self._timers and self._timers[0][0] <= self._logical_now:
            self._collect_due()
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle._cancelled:
                handle._run()

    def _look_outside(self, timeout: float | None) -> None:
        """Take what executors and signals brought; None waits for the first."""
        self._process_events(self._selector.select(timeout))  # type: ignore[attr-defined]

    def _jump(self) -> None:
        """Move the clock to the next timer that is not cancelled, and make it ready."""
        while self._timers:
            when, _, handle = heapq.heappop(self._timers)
            handle._scheduled = False  # type: ignore[attr-defined]
            if handle._cancelled:
                self._cancelled -= 1
                continue
            if when > self._logical_now:
                self._logical_now = when
            self._ready.append(handle)  # type: ignore[attr-defined]
            return
        raise Deadlock("every task waits and no timer is armed")

    def _collect_due(self) -> None:
        timers, now = self._timers, self._logical_now
        while timers and timers[0][0] <= now:
            handle = heapq.heappop(timers)[2]
            handle._scheduled = False  # type: ignore[attr-defined]
            if handle._cancelled:
                self._cancelled -= 1
            else:
                self._ready.append(handle)  # type: ignore[attr-defined]
