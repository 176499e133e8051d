"""The hosts of a run on a Ray that is there already (KubeRay's): its nodes, which a child process asks what they are and see.

consumes       `Looked`, the child's one answer, on its stdout
produces       the hosts in order, or the one sentence that says why they will not do
waits for      the child, at most `LOOK_SECONDS`
unblocked by   its answer or its end
on cancel      the child ends with this process

This process never imports Ray (see `segue.cluster.supervisor`), and the Ray is neither started nor stopped by anybody here.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from types import TracebackType
from typing import TYPE_CHECKING

from segue import wire
from segue.cluster.hosts.facts import differences
from segue.cluster.hosts.head import unfit
from segue.cluster.hosts.messages import HostFacts, Look, Looked
from segue.cluster.hosts.several import to_be_seen
from segue.cluster.processes import die_with_parent
from segue.config import Config
from segue.errors import RunFailed, UserError, WireError

if TYPE_CHECKING:
    from segue.cluster.prepare import Prepared

LOOK_SECONDS = 120.0
"""The child's start, its connection and a task on every node."""
TRIES = 5
"""Ray tries a second long, and 20 times by default, also where its token is refused."""


class Attached:
    """`Several` that are nodes of the Ray that `cluster.ray` names."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self.code = 1
        self.hosts: list[HostFacts] = []
        self.ray = ""

    def __enter__(self) -> Attached:
        seen = look(Look(self._config.cluster.ray))
        self.hosts, self.ray = seen.hosts, seen.ray
        if sentence := differences(self.hosts, self._config.rollout.engine):
            raise UserError(sentence)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        """Nobody waits for an end."""

    def check(self, prepared: Prepared) -> None:
        """See `Several`."""
        with to_be_seen(prepared, self.hosts) as (check, ports):
            seen = look(Look(self.ray, check, [host.address for host in self.hosts]))
            for host, checked in zip(self.hosts, seen.checked, strict=True):
                if sentence := unfit(f"Host {host.rank} ({host.name})", check, checked, ports.get(host.rank, 0)):
                    raise UserError(sentence)

    def order_join(self, ray_address: str, environment: dict[str, str], stop_seconds: float) -> None:
        """All are in it."""


def look(what: Look) -> Looked:
    """Have a short-lived child look at the nodes of a Ray. Raises `UserError` or `RunFailed` of one sentence."""
    command = [sys.executable, "-m", "segue.cluster.hosts.nodes"]
    environment = os.environ | {"RAY_NUM_REDIS_GET_RETRIES": str(TRIES)}
    end_with_us = functools.partial(die_with_parent, os.getpid())
    try:
        child = subprocess.run(
            command,
            input=wire.encode(what),
            env=environment,
            capture_output=True,
            check=False,
            timeout=LOOK_SECONDS,
            preexec_fn=end_with_us,
        )
    except subprocess.TimeoutExpired:
        raise RunFailed("ray", f"The Ray at {what.address} did not answer within {LOOK_SECONDS:g} s: look at its head.") from None
    try:
        seen = wire.decode(child.stdout, Looked)
    except WireError:
        said = (child.stderr.decode(errors="replace").strip().splitlines() or ["it said nothing"])[-1]
        raise RunFailed("ray", f"The Ray at {what.address} could not be looked at ({said}): look at its head.") from None
    if seen.sentence:
        raise UserError(seen.sentence)
    return seen
