"""The Ray actor that hosts a role: it gives the role's shell a process, a metrics port and a log file, and nothing else.

One class for all roles; which shell it builds is `segue.cluster.wiring`'s matter. Every method takes and returns plain values or
one `bytes` of MessagePack; errors come back as values (`Failure`), because Ray loses the fields of an exception.
"""

from __future__ import annotations

import asyncio
import faulthandler
import logging
import os
from pathlib import Path
from typing import Any

import msgspec

from segue import wire
from segue.cluster.hosts.interface import interface_environment
from segue.cluster.peers import RayPeer
from segue.cluster.ports import free_port
from segue.cluster.processes import output_to, survive_sigterm
from segue.cluster.roles import GET_FACTS, GetFacts, RoleSpec, failure_of
from segue.cluster.wiring import Host, build_host, config_of
from segue.errors import UserError
from segue.ports.rpc import Done, Failure
from segue.rundir import RunDir
from segue.suite_path import look_in

log = logging.getLogger(__name__)


class RoleActor:
    """See the module. `max_concurrency` is high: calls wait in the shell, never for one another."""

    def __init__(self, spec: bytes) -> None:
        self._spec = wire.decode(spec, RoleSpec)
        self._host: Host | None = None
        output_to(self._spec.log)  # Ray's own files go with Ray
        look_in(*RunDir(Path(self._spec.run_dir)).suite_path())  # a host's own environment does not have them
        if self._spec.address:
            os.environ.update(interface_environment(self._spec.address))
        faulthandler.enable()
        survive_sigterm()  # the driver stops the roles: in order, whoever else was told that the job ends

    async def pid(self) -> int:
        return os.getpid()

    async def free_port(self, purpose: str) -> int | bytes:
        """A port of this host that nobody listens on now."""
        config = config_of(self._spec)
        try:
            return free_port(config.cluster.interface, config.cluster.ports, purpose)
        except UserError as error:
            return wire.encode(failure_of(error, self._spec.name))

    async def build(self, rendezvous: str = "") -> bytes:
        """Import what the role needs and build its shell (heavy, and off the loop where it can be)."""
        self._spec = msgspec.structs.replace(self._spec, rendezvous=rendezvous)
        try:
            self._host = await build_host(self._spec)
        except Exception as error:
            return self._failed("building", error)
        return wire.encode(Done())

    async def connect(self, name: str, handle: Any) -> None:
        assert self._host is not None
        self._host.role.connect(name, RayPeer(name, handle))

    async def start(self) -> bytes:
        assert self._host is not None
        try:
            await self._host.start()
        except Exception as error:
            return self._failed("starting", error)
        return wire.encode(Done())

    async def call(self, method: str, body: bytes) -> bytes:
        if self._host is None:
            return wire.encode(Failure("internal", "NotBuilt", f"{self._spec.name} is still being built"))
        if method == GET_FACTS.name:
            return wire.encode(self._host.facts(wire.decode(body, GetFacts).names))
        return await self._host.role.handle(method, body)

    async def run(self) -> bytes:
        """Ends when the role does: `Done`, or the `Failure` it ended with."""
        assert self._host is not None
        try:
            await self._host.run()
        except asyncio.CancelledError:
            raise
        except Exception as error:
            return self._failed("running", error)
        return wire.encode(Done())

    async def stop(self) -> bytes:
        try:
            if self._host is not None:
                await self._host.stop()
        except Exception as error:
            return self._failed("stopping", error)
        return wire.encode(Done())

    def _failed(self, doing: str, error: Exception) -> bytes:
        if not isinstance(error, UserError):
            log.exception("%s failed while %s", self._spec.name, doing)
        return wire.encode(failure_of(error, self._spec.name))
