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
        self._alarm = Alarm(self, gate)

    def close(self) -> None:
        """There will be no more alarm."""
        self._alarm.close()

    @property
    def seconds(self) -> float:
        """Time used, what came before included."""
        return now() - self._began - self._excused - self._alarm.frozen

    @property
    def left(self) -> float:
        """What is left of the budget."""
        return self._budget - self.seconds

    def charge(self, excused: float) -> None:
        """So many seconds are not charged."""
        self._excused += excused

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

    def alarm(self, ring: Callable[[], None]) -> Alarm:
        """A context that calls `ring` if the budget ends inside, where time with the gate closed is not charged."""
        self._alarm.ring = ring
        return self._alarm


class Alarm:
    """A timer that stands still while the gate is closed; one for all requests of an attempt.

    What was armed for one request stays armed when that ends: the budget ends no sooner for the next one. If it fires too early,
    it is armed anew; if nobody wants it, it is not.
    """

    def __init__(self, wall: WallTime, gate: Gate) -> None:
        self._wall = wall
        self._gate = gate
        self._closed_before: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._waits_for_gate = False
        self.ring: Callable[[], None] = lambda: None

    @property
    def frozen(self) -> float:
        """Seconds inside that the gate was closed."""
        return 0.0 if self._closed_before is None else self._gate.closed_seconds - self._closed_before

    def __enter__(self) -> Alarm:
        self._closed_before = self._gate.closed_seconds
        if self._timer is None and not self._waits_for_gate:
            self._arm()
        return self

    def __exit__(self, *_: object) -> None:
        frozen, self._closed_before = self.frozen, None
        self._wall.charge(frozen)

    def close(self) -> None:
        """The attempt is over."""
        if self._timer is not None:
            self._timer.cancel()

    def _arm(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(max(0.0, self._wall.left), self._due)

    def _due(self) -> None:
        self._timer = None
        self._waits_for_gate = False
        if self._closed_before is None:
            return  # between two requests: the next one arms it
        if self._wall.left <= _CLOSE:
            self.ring()
        elif self._gate.level is Level.CLOSED:
            self._waits_for_gate = True
            self._gate.changed().add_done_callback(lambda _: self._due())
        else:
            self._arm()
