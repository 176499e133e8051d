"""The child of `segue.cluster.hosts.attached`: connects to a Ray that is there, asks each of its nodes, answers, ends.

consumes       one `Look` on stdin; on every node a task of Ray's, which needs no CPU
produces       one `Looked` on stdout; what libraries print goes to stderr
waits for      the connection, at most `CONNECT_SECONDS` to reach it at all; the tasks, at most `ANSWER_SECONDS`
"""

from __future__ import annotations

import ipaddress
import logging
import os
import re
import socket
import sys
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from segue import wire
from segue.cluster.hosts.facts import facts_here
from segue.cluster.hosts.member import checked
from segue.cluster.hosts.messages import Check, Checked, Hello, HostFacts, Look, Looked
from segue.errors import UserError

CONNECT_SECONDS = 10.0
ANSWER_SECONDS = 60.0

Node = dict[str, Any]
"""One of `ray.nodes()`."""


def main() -> None:
    answer = os.dup(1)
    os.dup2(2, 1)
    try:
        seen = _look(wire.decode(sys.stdin.buffer.read(), Look))
    except UserError as error:
        seen = Looked(str(error))
    with os.fdopen(answer, "wb") as out:
        out.write(wire.encode(seen))
    os._exit(0)  # Ray's exit handlers have nothing left to do


def _look(what: Look) -> Looked:
    nodes = _connect(what.address)
    own = str(ray.get_runtime_context().gcs_address)
    if what.check is not None:
        return Looked(ray=own, checked=_check(what.check, what.hosts, nodes, own))
    return Looked(ray=own, hosts=_describe(nodes, own))


def _connect(address: str) -> list[Node]:
    """The nodes of the Ray at `address` that are alive. Raises `UserError`."""
    if address != "auto":
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
        except OSError as error:
            raise UserError(
                f"No Ray answers at {address} ({error.strerror or error}): correct cluster.ray, or start that Ray first."
            ) from None
    if not any(process.info["name"] == "raylet" for process in psutil.process_iter(["name"])):
        raise UserError(f"This machine is no node of a Ray, and cluster.ray = '{address}': {_WHERE}.")
    try:
        ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
    except Exception as error:  # Ray raises whatever went wrong below it
        raise UserError(why(address, error)) from error
    return [node for node in ray.nodes() if node["Alive"]]


_WHERE = "start the run on a node of that Ray, under KubeRay in the head pod"


def why(address: str, error: Exception) -> str:
    """What kept this process from a Ray, as one sentence."""
    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None:
        causes.append(cause)
        cause = cause.__cause__
    text = " ".join(word for cause in causes for word in str(cause).split())
    last = str(causes[-1]).strip().rpartition("\n")[2]
    if found := re.search(r"cluster was started with: Ray: (\S+) Python: (\S+) .*started with: Ray: (\S+) Python: (\S+)", text):
        theirs, their_python, ours, our_python = found.groups()
        return (
            f"The Ray at {address} is Ray {theirs} on Python {their_python}, and here is Ray {ours} on Python {our_python}: "
            "install the same on all (with containers, use one image)."
        )
    if re.search("InvalidAuthToken|authentication token", text):
        return (
            f"The Ray at {address} wants a token, and another one than there is here: set RAY_AUTH_MODE and RAY_AUTH_TOKEN as "
            "its nodes have them."
        )
    if "Could not find any running Ray instance" in text:
        return f"cluster.ray = 'auto' finds no Ray on this machine: {_WHERE}, or name its address."
    return f"The Ray at {address} cannot be used from here ({last[:300]}): {_WHERE}."


def _describe(nodes: list[Node], own: str) -> list[HostFacts]:
    """What the nodes are: this one first, then those with GPUs, each by address, so that numbers mean the same every time."""
    here = ray.get_runtime_context().get_node_id()
    nodes = sorted(nodes, key=lambda node: (node["NodeID"] != here, not _gpus(node), _key(node["NodeManagerAddress"])))
    addresses = [node["NodeManagerAddress"] for node in nodes]
    for address in addresses:
        if addresses.count(address) > 1:
            raise UserError(
                f"Two nodes of the Ray at {own} have the address {address}, by which they are told apart: end one of them."
            )
    answers = _ask(nodes, _facts, [(rank, address) for rank, address in enumerate(addresses)])
    hosts = [wire.decode(answer, Hello).facts for answer in answers]
    return [
        msgspec.structs.replace(host, gpus=_gpus(node), cores=min(host.cores, int(node["Resources"].get("CPU", 0)) or host.cores))
        for host, node in zip(hosts, nodes, strict=True)
    ]


def _check(check: Check, addresses: Sequence[str], nodes: list[Node], own: str) -> list[Checked]:
    by_address = {node["NodeManagerAddress"]: node for node in nodes}
    if gone := [address for address in addresses if address not in by_address]:
        raise UserError(f"Host {addresses.index(gone[0])} ({gone[0]}) has left the Ray at {own}: start the run again.")
    question = wire.encode(check)
    answers = _ask([by_address[address] for address in addresses], _checked, [(question, address) for address in addresses])
    return [wire.decode(answer, Checked) for answer in answers]


def _ask(nodes: Sequence[Node], question: Callable[..., bytes], arguments: Sequence[tuple[Any, ...]]) -> list[bytes]:
    """The answer of each node. Raises `UserError` for the first that has none."""
    task = ray.remote(num_cpus=0, max_retries=0)(question)
    asked = [
        task.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)).remote(*each)
        for node, each in zip(nodes, arguments, strict=True)
    ]
    _, late = ray.wait(asked, num_returns=len(asked), timeout=ANSWER_SECONDS)
    answers = []
    for rank, (node, answer) in enumerate(zip(nodes, asked, strict=True)):
        who = f"Host {rank} ({node['NodeManagerHostname']} at {node['NodeManagerAddress']})"
        if answer in late:
            raise UserError(f"{who} has not answered for {ANSWER_SECONDS:g} s: look at that node of Ray, or take it out.")
        try:
            answers.append(ray.get(answer))
        except Exception as error:
            cause = str(error).strip().splitlines()[-1]
            raise UserError(
                f"{who} cannot run Segue's code ({cause}): install the same on all nodes (with containers, use one image)."
            ) from error
    return answers


def _facts(rank: int, address: str) -> bytes:
    return wire.encode(Hello(facts_here(rank, address)))


def _checked(check: bytes, address: str) -> bytes:
    return wire.encode(checked(wire.decode(check, Check), address))


def _gpus(node: Node) -> int:
    return int(node["Resources"].get("GPU", 0))


def _key(address: str) -> bytes:
    """By number, where it is an address and not a name."""
    try:
        return ipaddress.ip_address(address).packed
    except ValueError:
        return address.encode()


if __name__ == "__main__":
    main()
