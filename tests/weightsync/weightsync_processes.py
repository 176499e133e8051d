"""Peers in processes of their own, to be killed and frozen, and both ends of a transfer in this one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec

from segue.ports.transfer import Transfer, TransferResult
from segue.ports.weights import TransferFailed
from weightsync.receiver import TorchReceiver
from weightsync.sender import TorchSender
from weightsync.staged import Staged

WATCHDOG = 120.0
"""Seconds after which a test is a hang; far beyond any deadline it sets, so that it can only fire when one does not hold."""

BEYOND = 3 * WATCHDOG
"""A deadline that a test never sees: what must end before it ends by itself."""


class Peer:
    """A `weightsync_peer.py` process."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process
        self.address = ""

    async def hear(self, what: str) -> dict[str, Any]:
        """Its next answer, which must be `what`."""
        assert self.process.stdout is not None
        async with asyncio.timeout(WATCHDOG):
            line = await self.process.stdout.readline()
        answer: dict[str, Any] = json.loads(line or b'{"what": "exited"}')
        assert answer["what"] == what, answer
        return answer

    def order(self, transfer: Transfer, members: list[str] | None = None, halt: bool = False) -> None:
        self.tell(transfer=msgspec.to_builtins(transfer), members=members or [], halt=halt)

    def tell(self, **line: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(line).encode() + b"\n")

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


@asynccontextmanager
async def started(role: str) -> AsyncIterator[Peer]:
    script = str(Path(__file__).with_name("weightsync_peer.py"))
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        script,
        role,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"},
    )
    peer = Peer(process)
    try:
        peer.address = (await peer.hear("ready"))["address"]
        yield peer
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def stage(receiver: TorchReceiver, transfer: Transfer) -> Staged | str:
    try:
        return await receiver.stage(transfer, transfer.members.index(receiver.member_name) + 1)
    except TransferFailed as error:
        return str(error)


async def deliver(
    sender: TorchSender, receivers: list[TorchReceiver], transfer: Transfer
) -> tuple[TransferResult, list[Staged | str]]:
    """Both ends of a transfer, in this process."""
    sending = asyncio.ensure_future(sender.send(transfer))
    ends = await asyncio.gather(*(stage(receiver, transfer) for receiver in receivers))
    return await sending, ends
