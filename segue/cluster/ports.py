"""Free TCP ports out of `cluster.ports`."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Iterator

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


def check_ports(config: Config) -> None:
    """Raises `UserError` if the range has fewer free ports than the run takes: metrics, weight sync, the learner ranks."""
    nodes, ranks = config.rollout.nodes, config.learner.ranks
    targets = 1 + config.envpool.pools + 2 * nodes + 2 * ranks
    needed = targets + 1 + (ranks > 1)
    interface, (low, high) = config.cluster.interface, config.cluster.ports
    free = len(list(itertools.islice(_free_from_the_top(interface, (low, high)), needed)))
    if free < needed:
        raise UserError(
            f"cluster.ports = [{low}, {high}] has {free} free ports on {interface} and this run takes {needed}: "
            "stop what uses them or set another range."
        )


def _free_from_the_top(interface: str, ports: tuple[int, int]) -> Iterator[int]:
    low, high = ports
    for port in range(high, low - 1, -1):  # metrics servers take theirs from the bottom
        with socket.socket(socket.AF_INET6 if ":" in interface else socket.AF_INET) as probe:
            try:
                probe.bind((interface, port))
            except OSError:
                continue
        yield port
