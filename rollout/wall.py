"""The wall time of an attempt: what of it is charged, and an alarm for the moment its budget is used up.

Waiting for weights is not charged: neither at the gate, nor with a request that is frozen in a paused engine (`keep`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rollout.gate import Gate, Level
from segue.clock import now

_CLOSE = 1e-6
"""Seconds left that count as none: a timer for less might not move a clock."""


class WallTime:
    """Begins when it is made. `used` seconds of `budget` are spent by then."""

    def __init__(self, budget: float, used: float, gate: Gate) -> None:
        self._budget = budget
        self._gate = gate
        self._began = now() - used
        self._excused = 0.0
        self._alarm: _Alarm | None = None

    @property
    def seconds(self) -> float:
        """Time used, what came before included."""
        frozen = self._alarm.frozen if self._alarm is not None else 0.0
        return now() - self._began - self._excused - frozen

    @property
    def over(self) -> bool:
        return self.seconds >= self._budget - _CLOSE

    @contextmanager
    def excused(self) -> Iterator[None]:
        """What passes inside is not charged."""
        began = now()
        try:
            yield
        finally:
            self._excused += now() - began

    @contextmanager
    def alarm(self, ring: Callable[[], None]) -> Iterator[Callable[[], float]]:
        """Call `ring` if the budget ends inside, where time with the gate closed is not charged. Yields how long that was."""
        alarm = self._alarm = _Alarm(self._gate, lambda: self._budget - self.seconds, ring)
        alarm.arm()
        try:
            yield lambda: alarm.frozen
        finally:
            alarm.disarm()
            self._excused += alarm.frozen
            self._alarm = None


class _Alarm:
    """A timer that stands still while the gate is closed."""

    def __init__(self, gate: Gate, left: Callable[[], float], ring: Callable[[], None]) -> None:
        self._gate = gate
        self._closed_before = gate.closed_seconds
        self._left = left
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None
        self._armed = True

    @property
    def frozen(self) -> float:
        return self._gate.closed_seconds - self._closed_before

    def arm(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(max(0.0, self._left()), self._due)

    def disarm(self) -> None:
        self._armed = False
        if self._timer is not None:
            self._timer.cancel()

    def _due(self) -> None:
        if not self._armed:
            return
        if self._left() <= _CLOSE:
            self._ring()
        elif self._gate.level is Level.CLOSED:
            self._gate.changed().add_done_callback(lambda _: self._due())
        else:
            self.arm()
