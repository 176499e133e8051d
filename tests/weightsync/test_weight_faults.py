"""Members that die or freeze in the middle of a broadcast: real processes, SIGKILL and SIGSTOP at a known bucket."""

import asyncio
import signal

import pytest
from weightsync_processes import BEYOND, WATCHDOG, deliver, stage, started
from weightsync_support import assert_weights, make_receiver, make_sender, transfer_to, weights

from weightsync.staged import Staged

pytestmark = pytest.mark.processes


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
        # The sender's word for it, or the receiver's own, whose deadline passes in the same moment.
        assert isinstance(end, str) and ("n0 took part" in end or "the broadcast broke" in end)
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
