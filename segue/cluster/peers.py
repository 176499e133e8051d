"""The two transports of a `Peer`: a function call, and a Ray actor call."""

from __future__ import annotations

import asyncio
from typing import Any, Protocol

from segue.ports.rpc import PeerLost, PeerTimeout


class Handler(Protocol):
    """A role's shell, as far as a transport needs it."""

    async def handle(self, method: str, body: bytes) -> bytes: ...


class LocalPeer:
    """A role in this process: serial mode, virtual time and tests. The bytes are the same ones that Ray would carry."""

    def __init__(self, name: str, handler: Handler) -> None:
        self.name = name
        self._handler = handler

    async def call(self, method: str, body: bytes, timeout: float) -> bytes:
        try:
            async with asyncio.timeout(timeout):  # not wait_for, which in Python 3.11 can swallow a cancellation
                return await self._handler.handle(method, body)
        except TimeoutError:
            raise PeerTimeout(f"{self.name} did not answer {method} within {timeout:g} s") from None


class RayPeer:
    """A role in a Ray actor (`segue.cluster.actor.RoleActor`)."""

    def __init__(self, name: str, handle: Any) -> None:
        self.name = name
        self._handle = handle

    async def call(self, method: str, body: bytes, timeout: float) -> bytes:
        import ray.exceptions

        try:
            reference = self._handle.call.remote(method, body)
            async with asyncio.timeout(timeout):
                reply = await asyncio.wrap_future(reference.future())
        except TimeoutError:
            raise PeerTimeout(f"{self.name} did not answer {method} within {timeout:g} s") from None
        except ray.exceptions.RayError as error:
            raise PeerLost(f"{self.name} is gone ({type(error).__name__})") from None
        assert isinstance(reply, bytes)
        return reply
