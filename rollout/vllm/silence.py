"""A deadline on hearing from somebody."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from segue.clock import now


class Silence:
    """Calls `late` once when nothing was heard for `seconds` while something is expected. One timer serves many signs of life."""

    def __init__(self, seconds: float, late: Callable[[], None]) -> None:
        self._seconds = seconds
        self._late = late
        self._heard = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._expecting = False

    def expect(self, something: bool) -> None:
        """Say whether there is anything to wait for; the time runs from when that begins."""
        if something and not self._expecting:
            self._heard = now()
            if self._timer is None:
                self._arm()
        self._expecting = something

    def heard(self) -> None:
        """A sign of life."""
        self._heard = now()

    def rest(self) -> None:
        """Nothing is expected any more, and no timer stays behind."""
        self._expecting = False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _arm(self) -> None:
        self._timer = asyncio.get_running_loop().call_at(self._heard + self._seconds, self._look)

    def _look(self) -> None:
        self._timer = None
        if not self._expecting:
            return
        if now() < self._heard + self._seconds:
            self._arm()
        else:
            self._late()
