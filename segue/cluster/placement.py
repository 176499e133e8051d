"""Where the role processes of a run on several hosts go, as Ray placement groups: one per seat, each bound to a host.

A group reserves a role's GPUs on its host; when the host is lost and comes back, Ray reserves them there again. Which role sits
where is decided by `segue.cluster.hosts.layout`, not by Ray.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from typing import Any

import msgspec
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from segue.cluster.hosts.layout import Seat, elsewhere
from segue.cluster.hosts.messages import HostFacts
from segue.cluster.hosts.plan import Plan
from segue.cluster.ray_nodes import Addressed, Nodes, Numbered
from segue.config import Config
from segue.config.cluster import Role
from segue.errors import RunFailed

_A_LITTLE = 0.001
"""Of a host's resource: it binds a group to the host, and nobody ever runs out of it."""
_LOOK_SECONDS = 1.0
_LOST_SECONDS = 20.0
"""How much later than the death of a role Ray may learn that its host is gone: its health check asks 5 times, 3 s apart."""

log = logging.getLogger(__name__)


class Placement:
    """See the module. Seats may change while the run goes on."""

    def __init__(self, config: Config, plan: Plan) -> None:
        self._config = config
        self._hosts = {host.rank: host for host in plan.hosts}
        self._seats = {seat.name: seat for seat in plan.seats}
        self._groups: dict[str, Any] = {}
        self._used = Counter(seat.role for seat in plan.seats)
        """Numbers that processes of a role have had: they begin at 0, and none is given twice."""
        self._forgone: set[int] = set()
        """Hosts without which roles were given up."""
        # Ray's name of each host's node before any role started: one that comes back has another.
        self._first: dict[int, str] = {}
        self._nodes: Nodes = Addressed(plan.hosts) if plan.ray else Numbered()

    async def gathered(self, seconds: float) -> None:
        """All hosts have joined Ray. Raises `RunFailed` naming who has not after `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                while missing := sorted(set(self._hosts) - set(self._nodes.alive())):  # noqa: ASYNC110 - Ray tells nobody
                    await asyncio.sleep(_LOOK_SECONDS / 4)
        except TimeoutError:
            host = self._hosts[missing[0]]
            raise RunFailed(
                "start",
                f"Host {host.rank} ({host.name}) was no node of Ray within cluster.start_seconds = {seconds:g}: "
                + self._nodes.where_to_look(host),
            ) from None
        self._first = {rank: node["NodeID"] for rank, node in self._nodes.alive().items()}

    def options(self, name: str) -> dict[str, Any]:
        """For the role's actor: where it goes."""
        seat = self._seats[name]
        if name not in self._groups:
            bundle = {self._nodes.resource(self._hosts[seat.host]): _A_LITTLE} | ({"GPU": seat.gpus} if seat.gpus else {})
            self._groups[name] = placement_group([bundle], name=name)
        return {"scheduling_strategy": PlacementGroupSchedulingStrategy(self._groups[name], placement_group_bundle_index=0)}

    def host_of(self, name: str) -> int:
        return self._seats[name].host

    def address_of(self, name: str) -> str:
        return self._hosts[self._seats[name].host].address

    def describe(self, name: str) -> str:
        host = self._hosts[self._seats[name].host]
        return f"host {host.rank} ({host.name})"

    async def seat_again(self, name: str) -> bool:
        """Wait until the role has a place to start anew: its host, when it is there, or another; False if there is none.

        An env pool moves at once, as it holds nothing; where no other host may have it, it waits. A rollout node waits for its
        host, at most `cluster.absence_seconds`; where lost hosts do not come back, it takes another one as soon as that has room.
        """
        seat = self._seats[name]
        if seat.role == "envpool" and seat.host not in self._nodes.alive() and self._move(seat):
            return True
        patience = self._config.cluster.absence_seconds
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience):
                while (node := self._nodes.alive().get(seat.host)) is None:
                    if (seat.role == "envpool" or not self._nodes.come_back) and self._move(seat):
                        return True
                    await asyncio.sleep(_LOOK_SECONDS)
            # It may have come back under another address.
            self._hosts[seat.host] = msgspec.structs.replace(self._hosts[seat.host], address=node["NodeManagerAddress"])
            return True
        return self._move(seat)

    def _move(self, seat: Seat) -> bool:
        """Seat a role on another host, where one has room."""
        alive = self._nodes.alive()
        there = [host for rank, host in self._hosts.items() if rank in alive]
        moved = elsewhere(seat, self._config, there, (other for other in self._seats.values() if other.name != seat.name))
        if moved is None:
            return False
        self._vacate(seat)
        self._seats[seat.name] = moved
        log.info("%s moves from host %d to host %d", seat.name, seat.host, moved.host)
        return True

    def _vacate(self, seat: Seat) -> None:
        if group := self._groups.pop(seat.name, None):
            remove_placement_group(group)

    def give_up(self, name: str) -> None:
        """A role stays away. Should its host come back, that is as good as one that comes late."""
        seat = self._seats.pop(name)
        self._vacate(seat)
        self._forgone.add(seat.host)

    def there(self, name: str) -> bool:
        """Whether Ray believes that the role's host is there."""
        return self._seats[name].host in self._nodes.alive()

    async def lost_with(self, name: str) -> RunFailed | None:
        """What a role's death means while the roles start: that its host is lost, or None where the host stays there."""
        host = self._hosts[self._seats[name].host]
        if host.rank == 0:  # where this is asked
            return None
        try:
            async with asyncio.timeout(_LOST_SECONDS):
                while self._stays(host.rank):  # noqa: ASYNC110 - Ray tells nobody
                    await asyncio.sleep(_LOOK_SECONDS)
        except TimeoutError:
            return None
        what = f"Host {host.rank} ({host.name}) was lost while the roles started, and {name} with it"
        return RunFailed(name, f"{what}: {self._nodes.where_to_look(host)}")

    def _stays(self, rank: int) -> bool:
        """Whether Ray believes that a host is there, and was all the time since `gathered`."""
        node = self._nodes.alive().get(rank)
        return node is not None and node["NodeID"] == self._first.get(rank, node["NodeID"])

    def newcomers(self) -> list[str]:
        """Names of roles for hosts that came late, which have seats now: a pool on each as far as `envpool.max_pools` allows, and
        rollout nodes as far as `rollout.max_nodes` and its GPUs do."""
        names: list[str] = []
        for rank, node in sorted(self._nodes.alive().items()):
            if rank in self._hosts and rank not in self._forgone:
                continue
            self._forgone.discard(rank)
            gpus = int(node["Resources"].get("GPU", 0))
            address, name = node["NodeManagerAddress"], node["NodeManagerHostname"]
            self._hosts[rank] = HostFacts(rank, name, address, "", "", "", "", "", cores=1, gpus=gpus)
            each = self._config.rollout.gpus
            free = gpus - sum(seat.gpus for seat in self._seats.values() if seat.host == rank)
            room = int(free / each + 1e-6) if each else 1
            names += self._seat_more("envpool", 1, self._config.envpool.most, rank, 0.0)
            names += self._seat_more("rollout", room, self._config.rollout.most, rank, each)
        return names

    def _seat_more(self, role: Role, room: int, most: int, host: int, gpus: float) -> list[str]:
        """Up to `room` more of a role on a host, and `most` of it in all: their names."""
        count = min(room, most - sum(seat.role == role for seat in self._seats.values()))
        names = [f"{role}-{number}" for number in range(self._used[role], self._used[role] + count)]
        self._used[role] += len(names)
        self._seats |= {name: Seat(name, host, gpus) for name in names}
        return names
