"""What a node and the worker processes of its engine tell each other: messages, each behind its length, over a local socket."""

from __future__ import annotations

import asyncio
import struct
from typing import Any, TypeVar

from segue import wire
from segue.errors import WireError
from segue.ports.scheduler import Transfer
from segue.ports.weights import Manifest
from segue.wire import Message

M = TypeVar("M", bound=Message)

_LENGTH = struct.Struct("<I")


class WorkerOrder(Message, frozen=True):
    """Node → worker: take part in `stage` as `rank`; or, without one, let go of all that belongs to transfer `transfer`."""

    transfer: int
    stage: Transfer | None = None
    rank: int = 0


class WorkerReport(Message, frozen=True):
    """Worker → node: `member` is here (`transfer` −1), or how its part in `transfer` ended.

    `manifest` is what it holds now, verified; None where it failed, for `failure`. `metrics` are the calls that belong to the
    node's metrics: [method, name, value, labels].
    """

    member: str
    transfer: int = -1
    manifest: Manifest | None = None
    failure: str = ""
    metrics: list[tuple[str, str, float, dict[str, str]]] = []


async def send(writer: asyncio.StreamWriter, message: Message) -> None:
    """Raises `ConnectionError` when the other side is gone."""
    post(writer, message)
    await writer.drain()


def post(writer: asyncio.StreamWriter, message: Message) -> None:
    """Send without waiting; orders are short."""
    data = wire.encode(message)
    writer.write(_LENGTH.pack(len(data)) + data)


async def receive(reader: asyncio.StreamReader, kind: type[M]) -> M | None:
    """The next message; None when the other side is gone. Waits as long as the other side lives."""
    try:
        (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
        return wire.decode(await reader.readexactly(length), kind)
    except (asyncio.IncompleteReadError, ConnectionError, WireError):
        return None


class Recorder:
    """Stands in for the node's metrics in a worker: calls are kept, and travel with the next report."""

    def __init__(self) -> None:
        self._calls: list[tuple[str, str, float, dict[str, str]]] = []

    def add(self, name: str, value: float = 1.0, **labels: str) -> None:
        """As `Metrics.add`."""
        self._calls.append(("add", name, float(value), labels))

    def observe(self, name: str, value: float, **labels: str) -> None:
        """As `Metrics.observe`."""
        self._calls.append(("observe", name, float(value), labels))

    def take(self) -> list[tuple[str, str, float, dict[str, str]]]:
        """Everything since the last call."""
        calls, self._calls = self._calls, []
        return calls


def replay(calls: list[tuple[str, str, float, dict[str, str]]], metrics: Any) -> None:
    """Make the calls of a report."""
    for method, name, value, labels in calls:
        if method == "add":
            metrics.add(name, value, **labels)
        else:
            metrics.observe(name, value, **labels)
