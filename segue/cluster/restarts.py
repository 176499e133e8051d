"""How often roles may die before the run ends. Pure: the clock is handed in."""

from __future__ import annotations

from collections import deque

WINDOW_SECONDS = 3600.0


class Restarts:
    """Counts the deaths of each role process; at most `limit` of one are borne within `WINDOW_SECONDS`."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._deaths: dict[str, deque[float]] = {}
        self._starts: dict[str, int] = {}

    def died(self, name: str, now: float) -> int:
        """Note a death at `now`; how many there were in the window, this one included."""
        deaths = self._deaths.setdefault(name, deque())
        deaths.append(now)
        while deaths[0] <= now - WINDOW_SECONDS:
            deaths.popleft()
        return len(deaths)

    def too_many(self, name: str) -> bool:
        return len(self._deaths.get(name, ())) > self.limit

    def start(self, name: str) -> int:
        """The number of a process of this role that is about to start, counted from 1."""
        self._starts[name] = self._starts.get(name, 0) + 1
        return self._starts[name]
