"""Many deadlines, at most one per key, with the earliest at hand. Pure; setting, clearing and expiring cost O(log n)."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator


class Deadlines:
    """A heap whose outdated entries are skipped, and swept when they are the majority."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, int]] = []
        self._current: dict[int, int] = {}
        self._order = itertools.count()

    def set(self, key: int, when: float) -> None:
        """`key` is due at `when`, and no longer at what was set before."""
        token = next(self._order)
        self._current[key] = token
        heapq.heappush(self._heap, (when, token, key))
        if len(self._heap) > 64 + 2 * len(self._current):
            self._heap = [entry for entry in self._heap if self._current.get(entry[2]) == entry[1]]
            heapq.heapify(self._heap)

    def clear(self, key: int) -> None:
        """`key` is not due at all."""
        self._current.pop(key, None)

    def next(self) -> float | None:
        """The earliest deadline."""
        while self._heap:
            when, token, key = self._heap[0]
            if self._current.get(key) == token:
                return when
            heapq.heappop(self._heap)
        return None

    def due(self, now: float) -> Iterator[int]:
        """Keys whose time has come, earliest first; each is cleared before it is handed out."""
        while (when := self.next()) is not None and when <= now:
            key = heapq.heappop(self._heap)[2]
            del self._current[key]
            yield key
