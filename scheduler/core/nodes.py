"""Rollout nodes: their sessions, what they run, and which of them has room."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Iterator

from scheduler.core.episodes import Episode
from scheduler.core.meter import Meter
from segue.trajectory import NO_VERSION


class Node:
    """One session of a rollout node. `closed`: no new lease until its update is over; `update`: the one it takes part in.

    `mates` is the heap of waiting episodes that are at home here: they ran here last, or their group began here. `quota` is how
    many more groups may begin here while other nodes still load the same weights (None: any number).
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
        "quota",
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
        self.quota: int | None = None
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
    """All living sessions by name, and those with room in heaps, least loaded first: one heap per version that nodes run.

    Ties go to the node that was given a lease longest ago, so that equal nodes take turns. The number of versions that nodes
    run at one time is small, whatever their number.
    """

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self.by_name: dict[str, Node] = {}
        self.running: Counter[int] = Counter()
        self._free: dict[int, list[tuple[float, int, int, Node]]] = {}
        self._entries = 0
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

    # --- coming, going, loading -----------------------------------------------------------------------------------------

    def add(self, node: Node) -> None:
        """A new session."""
        self.by_name[node.name] = node
        self.running[node.version] += 1

    def remove(self, node: Node) -> None:
        """The session is over."""
        node.alive = False
        del self.by_name[node.name]
        self._leave(node.version)
        self.touch(node)

    def loaded(self, node: Node, version: int) -> None:
        """The node runs other weights."""
        self._leave(node.version)
        node.version = version
        self.running[version] += 1

    def _leave(self, version: int) -> None:
        self.running[version] -= 1
        if not self.running[version]:
            del self.running[version]

    def oldest(self) -> int:
        """The oldest version that a living node with weights runs; 0 if there is none."""
        return min((version for version in self.running if version != NO_VERSION), default=0)

    def all_run(self, version: int) -> bool:
        """Every living node runs this version."""
        return self.running[version] == len(self.by_name)

    # --- room -----------------------------------------------------------------------------------------------------------

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
            free = self._free.setdefault(node.version, [])
            heapq.heappush(free, (len(node.leased) / node.max_episodes, node.turn, self._stamp, node))
            self._entries += 1
            self._meter.operations += 1 + len(free).bit_length()
            if self._entries > 64 + 4 * len(self.by_name):
                self._compact()

    def least_loaded(self, floor: int) -> Node | None:
        """The least loaded node with room at version `floor` or newer."""
        best: tuple[float, int, int, Node] | None = None
        emptied: list[int] = []
        for version, free in self._free.items():
            self._meter.operations += 1
            if version < floor:
                continue
            while free and free[0][3].stamp != free[0][2]:
                heapq.heappop(free)
                self._entries -= 1
                self._meter.operations += 1 + len(free).bit_length()
            if not free:
                emptied.append(version)
            elif best is None or free[0] < best:
                best = free[0]
        for version in emptied:
            del self._free[version]
        return best[3] if best is not None else None

    def _compact(self) -> None:
        self._meter.operations += self._entries
        for free in self._free.values():
            free[:] = [entry for entry in free if entry[3].stamp == entry[2]]
            heapq.heapify(free)
        self._free = {version: free for version, free in self._free.items() if free}
        self._entries = sum(map(len, self._free.values()))
