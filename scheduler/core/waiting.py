"""Episodes that wait for a lease, oldest group first.

An episode may only go to a node at its floor version or newer, so there is one heap per floor; floors that every serving node
has reached share one. The number of heaps is the number of versions still in use, not of episodes. Entries whose episode was
leased or ended through another way stay behind and are dropped when they surface.
"""

from __future__ import annotations

import heapq

from scheduler.core.episodes import Episode
from scheduler.core.meter import Meter
from scheduler.core.nodes import Node

Heap = list[tuple[int, int, Episode]]


class Waiting:
    """The waiting heaps. `count` episodes wait; `everywhere` is a floor that all serving nodes have reached."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._by_floor: dict[int, Heap] = {}
        self._stamp = 0
        self.count = 0
        self.everywhere = 0

    def push(self, episode: Episode) -> None:
        """Let it wait, at its group's rank; behind those of equal rank that waited before."""
        self._stamp += 1
        if not episode.stamp:
            self.count += 1
        episode.stamp = self._stamp
        group = episode.group
        floor = episode.floor
        entry = (group.rank, self._stamp, episode)
        heap = self._by_floor.setdefault(0 if floor <= self.everywhere else floor, [])
        heapq.heappush(heap, entry)
        self._meter.operations += 2 + len(heap).bit_length()
        home = episode.prefix_home
        if home is not None and home.serving and home.version >= floor:
            self._clean(home.mates)  # nobody else does on a node that never has to look for mates: it would grow for ever
            heapq.heappush(home.mates, entry)
            self._meter.operations += 1 + len(home.mates).bit_length()

    def remove(self, episode: Episode) -> None:
        """It no longer waits (its entries are dropped later)."""
        if episode.stamp:
            episode.stamp = 0
            self.count -= 1

    def best(self, version: int) -> Episode | None:
        """The first in line for a node at `version`; it stays in line."""
        best: tuple[int, int, Episode] | None = None
        emptied: list[int] = []
        for floor, heap in self._by_floor.items():
            if floor > version:
                continue
            self._clean(heap)
            if not heap:
                emptied.append(floor)
            elif best is None or heap[0] < best:
                best = heap[0]
        for floor in emptied:
            del self._by_floor[floor]
        return best[2] if best is not None else None

    def beyond(self, version: int) -> bool:
        """Whether anybody waits for newer weights than these."""
        for floor, heap in self._by_floor.items():
            self._meter.operations += 1
            if floor > version:
                self._clean(heap)
                if heap:
                    return True
        return False

    def best_mate(self, node: Node) -> Episode | None:
        """The first in line of those that are at home on this node."""
        self._clean(node.mates)
        return node.mates[0][2] if node.mates else None

    def _clean(self, heap: Heap) -> None:
        while heap and heap[0][1] != heap[0][2].stamp:
            heapq.heappop(heap)
            self._meter.operations += 1 + len(heap).bit_length()
