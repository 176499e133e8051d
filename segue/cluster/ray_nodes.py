"""How the hosts of a run are found among Ray's nodes: by the number each was started with, or, on a Ray that was there before the
run, by address.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import ray

from segue.cluster.hosts.member import HOST_RESOURCE
from segue.cluster.hosts.messages import HostFacts

Node = dict[str, Any]
"""One of `ray.nodes()`."""


class Nodes(Protocol):
    """`come_back`: a host that was lost is expected under its number; else what replaces it is another host."""

    come_back: bool

    def alive(self) -> dict[int, Node]:
        """Ray's nodes that are there, by their host's number."""
        ...

    def resource(self, host: HostFacts) -> str:
        """What a host's node, and no other, has one unit of."""
        ...

    def where_to_look(self, host: HostFacts) -> str:
        """The end of a sentence about a host that is not there."""
        ...


class Numbered:
    """Hosts that were started one by one for this run (`segue.cluster.hosts.member`)."""

    come_back = True

    def alive(self) -> dict[int, Node]:
        found: dict[int, Node] = {}
        prefix = HOST_RESOURCE.format("")
        for node in ray.nodes():
            if node["Alive"]:
                for resource in node["Resources"]:
                    number = resource.removeprefix(prefix)
                    if resource.startswith(prefix) and number.isdecimal():
                        found[int(number)] = node
        return found

    def resource(self, host: HostFacts) -> str:
        return HOST_RESOURCE.format(host.rank)

    def where_to_look(self, host: HostFacts) -> str:
        return f"see logs/host-{host.rank}.log in the run directory; hosts must reach each other on all ports above 1024."


class Addressed:
    """Nodes of a Ray that was there before. Those nobody knew of get the next numbers, and keep them."""

    come_back = False

    def __init__(self, hosts: Iterable[HostFacts]) -> None:
        self._numbers = {host.address: host.rank for host in hosts}

    def alive(self) -> dict[int, Node]:
        there = {node["NodeManagerAddress"]: node for node in ray.nodes() if node["Alive"]}
        for address in sorted(there.keys() - self._numbers.keys()):
            self._numbers[address] = len(self._numbers)
        return {self._numbers[address]: node for address, node in there.items()}

    def resource(self, host: HostFacts) -> str:
        return f"node:{host.address}"  # Ray gives one to each node

    def where_to_look(self, host: HostFacts) -> str:
        return f"look at the node {host.name} of that Ray (under KubeRay: kubectl describe pod {host.name})."
