"""Calls between roles: one request and one reply, each a `Message`, over a transport that may be Ray or a function call.

A `Peer` is the far side as the caller sees it; a `Service` is the near side. Errors of the far side travel as values
(`Failure`) and come out of `ask` as `RemoteError`; the transport's own troubles are `PeerLost` and `PeerTimeout`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Generic, Protocol, TypeVar

import msgspec

from segue import wire
from segue.errors import UserError, WireError
from segue.wire import Message

Q = TypeVar("Q", bound=Message)
R = TypeVar("R", bound=Message)


class Peer(Protocol):
    """The far side of a channel. `call` raises `PeerLost` when it is gone and `PeerTimeout` after `timeout` seconds."""

    name: str

    async def call(self, method: str, body: bytes, timeout: float) -> bytes: ...


class Rpc(msgspec.Struct, Generic[Q, R], frozen=True):
    """One thing that can be asked of a role: its name, the request's class and the reply's."""

    name: str
    request: type[Q]
    reply: type[R]


class Failure(Message, frozen=True):
    """An error of the far side, as a value. `fault` is "user", "wire" or "internal"."""

    fault: str
    error: str
    sentence: str


class Done(Message, frozen=True):
    """The reply of a call that has nothing to say."""


class PeerError(Exception):
    """A call that brought no reply from the far side's logic."""


class PeerLost(PeerError):
    """The far side is dead or unreachable."""


class PeerTimeout(PeerError):
    """The far side did not answer by the deadline; it may still be working on it."""


class RemoteError(Exception):
    """The far side answered with an error. `error` is the class name it had there, `sentence` its text."""

    def __init__(self, fault: str, error: str, sentence: str) -> None:
        super().__init__(f"{error}: {sentence}")
        self.fault = fault
        self.error = error
        self.sentence = sentence


class Service:
    """The near side: routes encoded requests to handlers. Unknown methods and undecodable bytes are answered, not raised."""

    def __init__(self, on_error: Callable[[str, Exception], None] | None = None) -> None:
        self._routes: dict[str, tuple[Rpc[Any, Any], Callable[[Any], Awaitable[Any]]]] = {}
        self._on_error = on_error

    def add(self, rpc: Rpc[Q, R], handler: Callable[[Q], Awaitable[R]]) -> None:
        """Route `rpc` to an async handler."""
        assert rpc.name not in self._routes, rpc.name
        self._routes[rpc.name] = (rpc, handler)

    async def handle(self, method: str, body: bytes) -> bytes:
        """The reply's bytes; never raises (cancellation aside)."""
        try:
            route = self._routes.get(method)
            if route is None:
                raise WireError(f"no such call: {method}")
            rpc, handler = route
            return wire.encode(await handler(wire.decode(body, rpc.request)))
        except Exception as error:
            if self._on_error is not None:
                self._on_error(method, error)
            fault = "user" if isinstance(error, UserError) else "wire" if isinstance(error, WireError) else "internal"
            return wire.encode(Failure(fault, type(error).__name__, str(error)))


async def ask(peer: Peer, rpc: Rpc[Q, R], request: Q, timeout: float) -> R:
    """Send `request` and return the reply. Raises `RemoteError`, `PeerLost`, `PeerTimeout`, or a `WireError`."""
    reply = await peer.call(rpc.name, wire.encode(request), timeout)
    try:
        return wire.decode(reply, rpc.reply)
    except wire.UnknownMessage as unknown:
        try:
            failure = wire.decode(reply, Failure)
        except wire.UnknownMessage:
            raise unknown from None  # neither the reply nor an error: say what was expected
        raise RemoteError(failure.fault, failure.error, failure.sentence) from None
