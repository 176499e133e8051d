"""All deadlines of the core in one heap. A timer is known by (kind, key); arming it again replaces it."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from scheduler.core.meter import Meter

Key = int | str


class Timers:
    """Heap of deadlines. Replaced and disarmed entries stay in the heap until they surface or outnumber the armed ones."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._heap: list[tuple[float, int, str, Key]] = []
        self._armed: dict[tuple[str, Key], int] = {}
        self._count = 0

    def arm(self, kind: str, key: Key, when: float) -> None:
        """Fire (kind, key) at `when` instead of whenever it was armed for before."""
        self._count += 1
        self._armed[kind, key] = self._count
        heap = self._heap
        heapq.heappush(heap, (when, self._count, kind, key))
        self._meter.operations += 1 + len(heap).bit_length()
        if len(heap) > 64 + 2 * len(self._armed):
            self._compact()

    def disarm(self, kind: str, key: Key) -> None:
        """Never mind if it was not armed."""
        self._meter.operations += 1
        self._armed.pop((kind, key), None)

    def next(self) -> float | None:
        """When the first armed timer fires."""
        heap = self._heap
        while heap:
            when, count, kind, key = heap[0]
            if self._armed.get((kind, key)) == count:
                return when
            self._meter.operations += 1 + len(heap).bit_length()
            heapq.heappop(heap)
        return None

    def due(self, now: float) -> Iterator[tuple[str, Key]]:
        """Take the timers whose time has come, earliest first. Those armed meanwhile for `now` or earlier fire as well."""
        while True:
            when = self.next()
            if when is None or when > now:
                return
            _, _, kind, key = heapq.heappop(self._heap)
            self._meter.operations += 1 + len(self._heap).bit_length()
            del self._armed[kind, key]
            yield kind, key

    def _compact(self) -> None:
        self._meter.operations += len(self._heap)
        armed = self._armed
        self._heap = [entry for entry in self._heap if armed.get((entry[2], entry[3])) == entry[1]]
        heapq.heapify(self._heap)
