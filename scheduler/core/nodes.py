"""Rollout nodes: their sessions, what they run, and which of them has room."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from scheduler.core.episodes import Episode
from scheduler.core.meter import Meter
from segue.trajectory import NO_VERSION


class Node:
    """One session of a rollout node. `closed`: no new lease until its update is over; `update`: the one it takes part in.

    `mates` is the heap of waiting episodes that would like to begin here because their group did.
    """

    __slots__ = (
        "alive",
        "closed",
        "freed",
        "heard_at",
        "leased",
        "load_failures",
        "mates",
        "max_episodes",
        "name",
        "session",
        "stamp",
        "turn",
        "update",
        "version",
    )

    def __init__(self, name: str, session: int, max_episodes: int, now: float) -> None:
        self.name = name
        self.session = session
        self.max_episodes = max_episodes
        self.version = NO_VERSION
        self.leased: dict[int, Episode] = {}
        self.alive = True
        self.closed = False
        self.update: int | None = None
        self.load_failures = 0
        self.heard_at = now
        self.stamp = 0
        self.turn = 0
        self.freed = False
        self.mates: list[tuple[int, int, Episode]] = []

    @property
    def load(self) -> float:
        """Share of its episode loops that are taken."""
        return len(self.leased) / self.max_episodes

    @property
    def serving(self) -> bool:
        """May be given leases: alive, with weights, and not waiting for others to drain."""
        return self.alive and not self.closed and self.version != NO_VERSION

    @property
    def has_room(self) -> bool:
        return len(self.leased) < self.max_episodes


class NodeTable:
    """All living sessions by name, and a heap of those with room, least loaded first.

    Ties go to the node that was given a lease longest ago, so that equal nodes take turns.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self.by_name: dict[str, Node] = {}
        self._free: list[tuple[float, int, int, Node]] = []
        self._stamp = 0
        self._turn = 0

    def __iter__(self) -> Iterator[Node]:
        return iter(self.by_name.values())

    def __len__(self) -> int:
        return len(self.by_name)

    def get(self, name: str, session: int) -> Node | None:
        """The node if that session is its living one."""
        node = self.by_name.get(name)
        return node if node is not None and node.session == session else None

    def leased(self, node: Node) -> None:
        """The node was given a lease: others of the same load have their turn first."""
        self._turn += 1
        node.turn = self._turn
        self.touch(node)

    def touch(self, node: Node) -> None:
        """The node's load or standing changed: place it anew among those with room."""
        self._stamp += 1
        node.stamp = self._stamp
        if node.serving and node.has_room:
            free = self._free
            heapq.heappush(free, (len(node.leased) / node.max_episodes, node.turn, self._stamp, node))
            self._meter.operations += 1 + len(free).bit_length()
            if len(free) > 64 + 4 * len(self.by_name):
                self._meter.operations += len(free)
                self._free = [entry for entry in free if entry[3].stamp == entry[2]]
                heapq.heapify(self._free)

    def least_loaded(self, floor: int) -> Node | None:
        """The least loaded node with room at version `floor` or newer."""
        free = self._free
        aside: list[tuple[float, int, int, Node]] = []
        found = None
        while free:
            entry = free[0]
            node = entry[3]
            if node.stamp == entry[2]:
                if node.version >= floor:
                    found = node
                    break
                aside.append(entry)
            heapq.heappop(free)
            self._meter.operations += 1 + len(free).bit_length()
        for entry in aside:
            heapq.heappush(free, entry)
            self._meter.operations += 1 + len(free).bit_length()
        return found
