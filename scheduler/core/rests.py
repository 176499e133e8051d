"""Pauses between attempts that failed in a row: each is twice as long as the one before, up to a longest one."""

from __future__ import annotations

from scheduler.core.timers import Timers

REST = "rest"


class Rests:
    """What rests, by key, and how often in a row it failed. The timer `(REST, key)` ends a rest; whoever gets it calls `over`.

    Keys are few and come again (names of nodes), so that what has failed is remembered until it succeeds.
    """

    def __init__(self, timers: Timers, first_seconds: float, longest_seconds: float) -> None:
        self._timers = timers
        self._first = first_seconds
        self._longest = longest_seconds
        self._failures: dict[str, int] = {}
        self._resting: set[str] = set()

    def failed(self, key: str, now: float) -> int:
        """Another attempt failed: rest before the next one. Returns how many have failed in a row."""
        failures = self._failures[key] = self._failures.get(key, 0) + 1
        self._resting.add(key)
        self._timers.arm(REST, key, now + min(self._first * 2.0 ** min(failures - 1, 30), self._longest))
        return failures

    def succeeded(self, key: str) -> None:
        """Begin anew, without a rest."""
        if self._failures.pop(key, 0):
            self._resting.discard(key)
            self._timers.disarm(REST, key)

    def over(self, key: str) -> None:
        """The timer fired."""
        self._resting.discard(key)

    def __contains__(self, key: str) -> bool:
        return key in self._resting
