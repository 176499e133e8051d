"""What the driver is told, numbered; it asks for what comes after the last one it has, and that acknowledges the others."""

from __future__ import annotations

from collections import deque
from typing import Any

from segue.ports.driver import RunEvent


class RunEvents:
    """Events that the driver has not acknowledged yet. Numbers start at 1."""

    def __init__(self) -> None:
        self._events: deque[RunEvent] = deque()
        self._next = 1

    def add(self, what: str, data: dict[str, Any]) -> None:
        """`what`: step, update, eval, warning, fatal, stopped."""
        self._events.append(RunEvent(self._next, what, data))
        self._next += 1

    def after(self, number: int) -> list[RunEvent]:
        """All events after `number`; those up to it are forgotten."""
        while self._events and self._events[0].number <= number:
            self._events.popleft()
        return list(self._events)
