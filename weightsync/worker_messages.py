"""What a node and the worker processes of its engine tell each other: messages, each behind its length, over a local socket."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from typing import Any, TypeVar

from segue import wire
from segue.errors import WireError
from segue.ports.transfer import Transfer
from segue.ports.weights import Manifest
from segue.wire import Message

M = TypeVar("M", bound=Message)

_LENGTH = struct.Struct("<I")


class WorkerOrder(Message, frozen=True):
    """Node → worker: take part in `begin` as `rank`, and hold what arrives (`open`: let it arrive when it is loaded); or, without
    one, let go of all that belongs to transfer `transfer`."""

    transfer: int
    begin: Transfer | None = None
    rank: int = 0
    open: bool = False


class WorkerReport(Message, frozen=True):
    """Worker → node: `member` is here (`transfer` −1), or how it fares in `transfer`.

    `manifest` is what it holds now, verified (or what is about to arrive); None where it failed, for `failure`. `metric` is a
    call for the node's metrics, [method, name, value, labels], and then the report says nothing else.
    """

    member: str
    transfer: int = -1
    manifest: Manifest | None = None
    failure: str = ""
    metric: tuple[str, str, float, dict[str, str]] | None = None


def post(writer: asyncio.StreamWriter, message: Message) -> None:
    """Send without waiting; nothing happens once the connection is closing. Messages are short."""
    if writer.is_closing():
        return
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
    """Stands in for the node's metrics in a worker: every call travels to the node. `report` sends one."""

    def __init__(self, report: Callable[[tuple[str, str, float, dict[str, str]]], None]) -> None:
        self._report = report

    def add(self, name: str, value: float = 1.0, **labels: str) -> None:
        """As `Metrics.add`."""
        self._report(("add", name, float(value), labels))

    def observe(self, name: str, value: float, **labels: str) -> None:
        """As `Metrics.observe`."""
        self._report(("observe", name, float(value), labels))


def replay(call: tuple[str, str, float, dict[str, str]], metrics: Any) -> None:
    """Make the call of a report."""
    method, name, value, labels = call
    if method == "add":
        metrics.add(name, value, **labels)
    else:
        metrics.observe(name, value, **labels)
