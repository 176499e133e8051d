"""Free TCP ports out of `cluster.ports`."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator, Sequence

from segue.config import Config
from segue.errors import UserError


def free_port(interface: str, ports: tuple[int, int], purpose: str) -> int:
    """A port of the range nobody listens on now. Raises `UserError` if there is none."""
    low, high = ports
    port = next(_free_from_the_top(interface, ports), None)
    if port is not None:
        return port
    raise UserError(
        f"No port of cluster.ports = [{low}, {high}] is free on {interface} for {purpose}: "
        "stop what uses them or set another range."
    )


def ports_needed(roles: Sequence[str]) -> int:
    """How many ports these roles take on their host: metrics, and for learner ranks weight sync and a place to meet."""
    each = {"scheduler": 1, "envpool": 1, "rollout": 2, "learner": 2}
    return sum(each[role] for role in roles) + ("learner" in roles) + (roles.count("learner") > 1)


def free_ports(interface: str, ports: tuple[int, int], enough: int = 1000) -> int:
    """How many ports of the range are free, counted up to `enough`."""
    return len(list(itertools.islice(_free_from_the_top(interface, ports), enough)))


def check_ports(config: Config, address: str, roles: Sequence[str]) -> None:
    """Raises `UserError` if the range has fewer free ports at `address`, this host's, than these roles take."""
    needed = ports_needed(roles)
    low, high = config.cluster.ports
    free = free_ports(address, (low, high), needed)
    if free < needed:
        raise UserError(
            f"cluster.ports = [{low}, {high}] has {free} free ports on {address} and this run takes {needed} here: "
            "stop what uses them or set another range."
        )


def all_roles(config: Config) -> list[str]:
    """The role of each process of a run."""
    pools, nodes, ranks = config.envpool.pools, config.rollout.nodes, config.learner.ranks
    return ["scheduler", *["envpool"] * pools, *["rollout"] * nodes, *["learner"] * ranks]


def _free_from_the_top(interface: str, ports: tuple[int, int]) -> Iterator[int]:
    low, high = ports
    for port in range(high, low - 1, -1):  # metrics servers take theirs from the bottom
        with socket.socket(socket.AF_INET6 if ":" in interface else socket.AF_INET) as probe:
            try:
                probe.bind((interface, port))
            except OSError:
                continue
        yield port
