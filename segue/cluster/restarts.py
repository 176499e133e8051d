"""How often roles may die before the run ends, and what took them. Pure: the clock is handed in."""

from __future__ import annotations

from collections import Counter, deque

WINDOW_SECONDS = 3600.0


class Restarts:
    """Counts the deaths of each role process; at most `limit` of one are borne within `WINDOW_SECONDS`."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._deaths: dict[str, deque[float]] = {}
        self._reasons: dict[str, Counter[str]] = {}

    def died(self, name: str, reason: str, now: float) -> int:
        """Note a death at `now`; how many there were in the window, this one included."""
        self._reasons.setdefault(name, Counter())[reason] += 1
        deaths = self._deaths.setdefault(name, deque())
        deaths.append(now)
        while deaths[0] <= now - WINDOW_SECONDS:
            deaths.popleft()
        return len(deaths)

    def too_many(self, name: str) -> bool:
        return len(self._deaths.get(name, ())) > self.limit

    def reasons(self, name: str) -> dict[str, int]:
        """All deaths of a role so far, by reason."""
        return dict(self._reasons.get(name, ()))
