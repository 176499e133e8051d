"""Members that die or freeze in the middle of a broadcast: real processes, SIGKILL and SIGSTOP at a known bucket."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from weightsync_support import assert_weights, make_receiver, make_sender, transfer_to, weights

from segue.ports.scheduler import Transfer, TransferResult
from segue.ports.weights import TransferFailed
from weightsync.receiver import TorchReceiver
from weightsync.sender import TorchSender
from weightsync.staged import Staged

pytestmark = pytest.mark.processes

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
        assert self.process.stdin is not None
        line = json.dumps({"transfer": msgspec.to_builtins(transfer), "members": members or [], "halt": halt})
        self.process.stdin.write(line.encode() + b"\n")

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)


Start = Callable[[str], Awaitable[Peer]]


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


@pytest.mark.parametrize("rank", [1, 3])
async def test_a_receiver_killed_in_the_middle_is_named_and_the_survivors_go_on(rank: int) -> None:
    """The dead one is a relay of gloo's broadcast tree, or a leaf. Nobody may wait for the deadline: the watchdog comes first."""
    members = ["n0", "n1", "n2"]
    victim = members[rank - 1]
    sender = make_sender(roll_call_seconds=2.0)
    sender.publish(0, weights(0))
    receivers = [make_receiver(name) for name in members if name != victim]
    transfer = transfer_to(sender.address, members, number=0, step=0, group=1, deadline_seconds=BEYOND)
    async with asyncio.timeout(WATCHDOG), started("receiver") as peer:
        peer.order(transfer, [victim], halt=True)
        running = asyncio.ensure_future(deliver(sender, receivers, transfer))
        await peer.hear("halted")
        peer.signal(signal.SIGKILL)
        result, ends = await running
        assert not result.ok and result.missing == [victim]
        assert f"{victim} took part and is silent since the broadcast broke" in result.reason
        for end in ends:
            assert isinstance(end, str) and victim in end
        survivors = [name for name in members if name != victim]
        again = transfer_to(sender.address, survivors, number=1, step=0, group=2)
        result, ends = await deliver(sender, receivers, again)
        assert result.ok
        for end in ends:
            assert isinstance(end, Staged)
            assert_weights(end, 0)
    sender.close()
    for receiver in receivers:
        receiver.close()


async def test_a_frozen_receiver_is_named_by_the_deadline_and_its_late_return_is_refused() -> None:
    sender = make_sender(roll_call_seconds=1.0)
    sender.publish(0, weights(0, layers=600))  # more than the sockets between them hold
    receiver = make_receiver("n1")
    transfer = transfer_to(sender.address, ["n0", "n1"], number=0, step=0, group=1, deadline_seconds=6.0)
    async with asyncio.timeout(WATCHDOG), started("receiver") as peer:
        peer.order(transfer, ["n0"], halt=True)
        running = asyncio.ensure_future(deliver(sender, [receiver], transfer))
        await peer.hear("halted")
        peer.signal(signal.SIGSTOP)
        result, [end] = await running
        assert not result.ok and result.missing == ["n0"] and "n0 took part" in result.reason
        assert isinstance(end, str) and "n0 took part" in end
        sender.publish(1, weights(1))
        again = transfer_to(sender.address, ["n1"], number=1, step=1, group=2)
        result, [staged] = await deliver(sender, [receiver], again)
        assert result.ok and isinstance(staged, Staged)
        assert_weights(staged, 1)
        peer.signal(signal.SIGCONT)
        late = await peer.hear("failed")
        assert late["member"] == "n0"
    sender.close()
    receiver.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_sender_that_dies_or_freezes_in_the_middle_is_a_sentence_by_the_deadline(number: signal.Signals) -> None:
    """A frozen one takes the store with it: the threads in it do not come back, and nobody waits for them."""
    receivers = [make_receiver(name) for name in ("n0", "n1")]
    async with asyncio.timeout(WATCHDOG), started("sender") as peer:
        seconds = BEYOND if number is signal.SIGKILL else 4.0
        transfer = transfer_to(peer.address, ["n0", "n1"], number=0, step=0, deadline_seconds=seconds)
        running = asyncio.gather(*(stage(receiver, transfer) for receiver in receivers))
        peer.order(transfer, halt=True)
        await peer.hear("halted")
        peer.signal(number)
        for name, end in zip(("n0", "n1"), await running, strict=True):
            assert isinstance(end, str) and end.startswith(f"{name} did not receive version 100")
    for receiver in receivers:
        receiver.close()


async def test_receivers_of_another_process_get_every_version() -> None:
    sender = make_sender()
    members = ["n0", "n1", "n2"]
    async with asyncio.timeout(WATCHDOG), started("receiver") as peer:
        for step in range(3):
            sender.publish(step, weights(step))
            transfer = transfer_to(sender.address, members, number=step, step=step)
            peer.order(transfer, members)
            result = await sender.send(transfer)
            assert result.ok, result.reason
            for _ in members:
                answer = await peer.hear("staged")
                assert answer["good"] and answer["step"] == step and answer["version"] == 100 + step
    sender.close()
