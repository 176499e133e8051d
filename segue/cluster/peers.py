"""The two transports of a `Peer`: a function call, and a Ray actor call."""

from __future__ import annotations

import asyncio
import types
from collections.abc import Coroutine, Generator
from typing import Any, Protocol

from segue.ports.rpc import PeerLost, PeerTimeout


class Handler(Protocol):
    """A role's shell, as far as a transport needs it."""

    def handle(self, method: str, body: bytes) -> Coroutine[Any, Any, bytes]: ...


class LocalPeer:
    """A role in this process: serial mode, virtual time and tests. The bytes are the same ones that Ray would carry."""

    def __init__(self, name: str, handler: Handler) -> None:
        self.name = name
        self._handler = handler

    async def call(self, method: str, body: bytes, timeout: float) -> bytes:
        work = self._handler.handle(method, body)
        try:
            first = work.send(None)  # most calls are answered without a wait: these need no timer
        except StopIteration as done:
            reply: bytes = done.value
            return reply
        try:
            async with asyncio.timeout(timeout):  # not wait_for, which in Python 3.11 can swallow a cancellation
                return await _rest(work, first)
        except TimeoutError:
            raise PeerTimeout(f"{self.name} did not answer {method} within {timeout:g} s") from None


@types.coroutine
def _rest(work: Coroutine[Any, Any, bytes], waits_for: Any) -> Generator[Any, Any, bytes]:
    """Go on with a coroutine that was begun and now waits for a future (None: for the next round of the loop)."""
    error: BaseException | None
    while True:
        try:
            value = yield waits_for
        except GeneratorExit:
            work.close()
            raise
        except BaseException as raised:
            error = raised
            value = None
        else:
            error = None
        try:
            waits_for = work.send(value) if error is None else work.throw(error)
        except StopIteration as done:
            reply: bytes = done.value
            return reply


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
