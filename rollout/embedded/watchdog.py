"""Compute calls under a deadline. A thread cannot be interrupted: past the deadline its owner is told, and gives up."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from typing import TypeVar

from segue.clock import Compute, now

T = TypeVar("T")


class WatchedCompute:
    """Runs calls on a `Compute`, one at a time, and calls `late` once when one takes longer than `seconds`.

    One timer serves many short calls: when it fires it looks at when the present call began, and is armed again for that one.
    `rest` disarms it, so that nothing is timed while nothing is computed.
    """

    def __init__(self, compute: Compute, seconds: float, late: Callable[[], None]) -> None:
        self._compute = compute
        self._seconds = seconds
        self._late = late
        self._began = math.inf
        self._timer: asyncio.TimerHandle | None = None

    async def run(self, work: Callable[[], T], cost: float) -> T:
        self._began = now()
        if self._timer is None:
            self._look()
        try:
            return await self._compute.run(work, cost)
        finally:
            self._began = math.inf

    def _look(self) -> None:
        self._timer = None
        if self._began == math.inf:
            return
        deadline = self._began + self._seconds
        if now() < deadline:
            self._timer = asyncio.get_running_loop().call_at(deadline, self._look)
        else:
            self._late()

    def rest(self) -> None:
        """No call is running, and none is about to."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
