"""Who runs where: roles to hosts. Pure; what it returns is the world map that is printed before anything starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import cast

from segue.cluster.hosts.messages import HostFacts
from segue.config import Config
from segue.config.cluster import Role
from segue.errors import UserError

_COUNTS: dict[Role, Callable[[Config], int]] = {
    "scheduler": lambda config: 1,
    "learner": lambda config: config.learner.ranks,
    "rollout": lambda config: config.rollout.nodes,
    "envpool": lambda config: config.envpool.pools,
}
_KEYS: dict[Role, str] = {"learner": "learner.ranks", "rollout": "rollout.nodes", "envpool": "envpool.pools"}
_SMALL = 1e-6
"""Shares of a GPU are added up."""


@dataclass(frozen=True)
class Seat:
    """One role process and the host it runs on, with as many of that host's GPUs."""

    name: str
    host: int
    gpus: float = 0.0

    @property
    def role(self) -> Role:
        return cast(Role, self.name.rpartition("-")[0])


@dataclass
class _Room:
    host: HostFacts
    gpus: float = 0.0
    seats: list[str] = field(default_factory=list)

    def load(self) -> float:
        """Processes per core."""
        return len(self.seats) / max(1, self.host.cores)

    def trains(self) -> bool:
        return self.ranks() > 0

    def ranks(self) -> int:
        """Learner ranks that sit here."""
        return sum(seat.startswith("learner-") for seat in self.seats)


def lay_out(config: Config, hosts: Sequence[HostFacts]) -> list[Seat]:
    """A host for every role process of the config. Raises `UserError` when they do not fit.

    - Learner ranks stay together: as few hosts as can be, those with most GPUs first. Without GPUs they sit on the first host, or
      spread over those that `cluster.hosts` names.
    - A rollout node sits whole on one host (its workers talk at every layer): where most GPUs are free, and without GPUs where
      there is least to do, hosts of learner ranks last.
    - Env pools prefer hosts without GPUs, then those with least to do. The scheduler sits beside the driver, on the first host.
    - `cluster.hosts` says which hosts a role may use; else all.
    """
    rooms = {host.rank: _Room(host, float(host.gpus)) for host in hosts}
    _check_named(config, rooms)
    seats: list[Seat] = []
    each: list[tuple[Role, float]] = [
        ("scheduler", 0.0),
        ("learner", config.learner.gpus),
        ("rollout", config.rollout.gpus),
        ("envpool", 0.0),
    ]
    for role, gpus in each:
        allowed = config.cluster.hosts.get(role)
        among = [rooms[rank] for rank in (sorted(rooms) if allowed is None else allowed)]
        if role == "learner" and not gpus and allowed is None:
            among = among[:1]
        for number in range(_COUNTS[role](config)):
            room = _choose(role, gpus, among)
            if room is None:
                raise UserError(_too_little(role, gpus, config, among))
            name = f"{role}-{number}"
            room.gpus -= gpus
            room.seats.append(name)
            seats.append(Seat(name, room.host.rank, gpus))
    return seats


def elsewhere(seat: Seat, config: Config, hosts: Sequence[HostFacts], taken: Iterable[Seat]) -> Seat | None:
    """Another seat among `hosts` for a role whose host is gone, beside the seats that are `taken`; None where no room is left."""
    rooms = {host.rank: _Room(host, float(host.gpus)) for host in hosts}
    for other in taken:
        if other.host in rooms:
            rooms[other.host].gpus -= other.gpus
            rooms[other.host].seats.append(other.name)
    allowed = config.cluster.hosts.get(seat.role)
    among = [room for rank, room in sorted(rooms.items()) if allowed is None or rank in allowed]
    room = _choose(seat.role, seat.gpus, among)
    return None if room is None else Seat(seat.name, room.host.rank, seat.gpus)


def _choose(role: Role, gpus: float, among: list[_Room]) -> _Room | None:
    fitting = [room for room in among if room.gpus + _SMALL >= gpus]
    if not fitting:
        return None
    if role == "scheduler":
        return fitting[0]
    if role == "learner" and not gpus:
        return min(fitting, key=lambda room: room.ranks() / max(1, room.host.cores))
    if role == "learner":  # fill a host that has a rank already before opening another
        return max(fitting, key=lambda room: (room.trains(), room.gpus, -room.host.rank))
    if role == "rollout" and gpus:
        return max(fitting, key=lambda room: (room.gpus, -room.host.rank))
    if role == "rollout":
        return min(fitting, key=lambda room: (room.trains(), room.load(), room.host.rank))
    return min(fitting, key=lambda room: (room.host.gpus > 0, room.load(), room.host.rank))


def _check_named(config: Config, rooms: dict[int, _Room]) -> None:
    for role, ranks in config.cluster.hosts.items():
        unknown = [rank for rank in ranks if rank not in rooms]
        if unknown:
            raise UserError(
                f"cluster.hosts.{role} names host {unknown[0]} and this run has {_count(len(rooms), 'host')}, numbered from 0: "
                "correct it, or start more hosts."
            )


def _too_little(role: Role, gpus: float, config: Config, among: list[_Room]) -> str:
    total = sum(room.host.gpus for room in among)
    wanted = _COUNTS[role](config)
    return (
        f"{_KEYS[role]} = {wanted} with {gpus:g} GPU each do not fit on {_count(len(among), 'host')} with {_count(total, 'GPU')} "
        f"(beside what else runs there): lower {_KEYS[role]} or {role}.gpus, or start more hosts."
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def map_lines(seats: Sequence[Seat], hosts: Sequence[HostFacts]) -> list[str]:
    """The world map: a line per host, with its roles and the GPUs each gets."""
    from segue.cluster.hosts.facts import short

    lines = []
    for host in hosts:
        here = [seat for seat in seats if seat.host == host.rank]
        roles = ", ".join(f"{seat.name} ({seat.gpus:g} GPU)" if seat.gpus else seat.name for seat in here) or "nothing"
        lines.append(f"  host {host.rank:<4} {short(host)}: {roles}")
    return lines
