"""Several learner ranks send: each has its share of the buckets alone, in a group of its own with all members."""

import asyncio
import signal
import threading
from collections.abc import AsyncIterator

import pytest
from weightsync_processes import BEYOND, WATCHDOG, deliver, started
from weightsync_support import (
    GENEROUS,
    SOURCES,
    Gauged,
    assert_weights,
    make_receiver,
    make_sender,
    make_source,
    publish_share,
    transfer_to,
)

from segue.ports.transfer import Transfer, TransferResult
from segue.ports.weights import FurtherSource
from weightsync.receiver import TorchReceiver
from weightsync.sender import TorchSender
from weightsync.source import TorchSource
from weightsync.staged import Staged
from weightsync.store import Channel

MEMBERS = ["n0", "n1"]


class Ranks:
    """A sender, a further source, and two receivers, in one process."""

    def __init__(self) -> None:
        self.gauged = Gauged()
        self.sender = make_sender(sources=SOURCES)
        self.source = make_source(gauged=self.gauged)
        self.receivers = [make_receiver(name) for name in MEMBERS]
        self.serving = asyncio.ensure_future(self.source.serve(self.sender.address))

    async def publish_and_deliver(self, step: int, number: int, group: int = 1) -> tuple[TransferResult, list[Staged | str]]:
        for rank in (self.sender, self.source):
            publish_share(rank, step)
        return await deliver(self.sender, self.receivers, transfer_to(self.sender.address, MEMBERS, number, step, group))


@pytest.fixture
async def ranks() -> AsyncIterator[Ranks]:
    made = Ranks()
    yield made
    made.source.close()
    made.sender.close()
    for receiver in made.receivers:
        receiver.close()
    made.serving.cancel()


def assert_delivered(result: TransferResult, ends: list[Staged | str], step: int) -> None:
    assert result.ok and result.missing == [], result.reason
    for end in ends:
        assert isinstance(end, Staged), end
        assert_weights(end, step)


async def test_every_bucket_comes_from_its_source_bit_for_bit(ranks: Ranks) -> None:
    """Each rank holds no other buckets than its own, over several versions and the same groups."""
    for step in range(3):
        assert_delivered(*await ranks.publish_and_deliver(step, number=step), step)
        shares = []
        for rank, shelf in enumerate((ranks.sender.shelf, ranks.source.shelf)):
            with shelf.pinned(step) as kept:
                assert kept is not None and kept.mine == list(range(rank, len(kept.buckets), 2))
                shares.append(sum(kept.bucket(number).numel() for number in kept.mine))
                total = kept.nbytes
        assert sum(shares) == total and min(shares) > 0
        async with asyncio.timeout(WATCHDOG):  # the source is not asked whether it is done: only receivers are
            while (sent := ranks.gauged.metrics.value("segue_weight_sync_bytes_total")) < (step + 1) * shares[1]:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert sent == (step + 1) * shares[1]
    assert ranks.gauged.failures("transfer") == ranks.gauged.failures("stage") == 0


async def test_a_source_that_lags_behind_is_waited_for(ranks: Ranks) -> None:
    """Rank 0 may be ordered to send before another rank has copied its share aside."""
    publish_share(ranks.sender, 0)
    running = asyncio.ensure_future(deliver(ranks.sender, ranks.receivers, transfer_to(ranks.sender.address, MEMBERS, 0, 0)))
    await asyncio.wait([running], timeout=0.2)
    assert not running.done()
    publish_share(ranks.source, 0)
    assert_delivered(*await running, 0)


async def test_orders_that_overtake_each_other_are_both_obeyed(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update and a join run side by side, in threads of their own: the later one's order may be there first."""
    order, later = Channel.order, threading.Event()

    def overtaken(channel: Channel, name: str, transfer: Transfer) -> None:
        if transfer.transfer == 0:
            assert later.wait(GENEROUS)
        order(channel, name, transfer)
        if transfer.transfer == 1:
            later.set()

    monkeypatch.setattr(Channel, "order", overtaken)
    for rank in (ranks.sender, ranks.source):
        publish_share(rank, 0)
    both = [
        deliver(ranks.sender, [receiver], transfer_to(ranks.sender.address, [name], number, 0, number + 1))
        for number, (name, receiver) in enumerate(zip(MEMBERS, ranks.receivers, strict=True))
    ]
    for result, ends in await asyncio.gather(*both):
        assert_delivered(result, ends, 0)


async def test_a_source_without_the_step_and_one_with_another_layout_are_named(ranks: Ranks) -> None:
    publish_share(ranks.sender, 0)
    publish_share(ranks.source, 1)
    transfer = transfer_to(ranks.sender.address, MEMBERS, 0, 0, deadline_seconds=2.0)
    result, ends = await deliver(ranks.sender, ranks.receivers, transfer)
    assert not result.ok and result.missing == ["learner-1"]
    assert "learner-1" in result.reason and all("learner-1" in str(end) for end in ends)
    publish_share(ranks.sender, 2)
    publish_share(ranks.source, 2, layers=7)
    result, _ = await deliver(ranks.sender, ranks.receivers, transfer_to(ranks.sender.address, MEMBERS, 1, 2, group=2))
    assert result.missing == ["learner-1"] and "laid out in another way" in result.reason
    assert_delivered(*await ranks.publish_and_deliver(3, number=2, group=3), 3)


async def test_a_damaged_bucket_of_another_source_is_found(ranks: Ranks) -> None:
    publish_share(ranks.sender, 0)
    publish_share(ranks.source, 0)
    with ranks.source.shelf.pinned(0) as kept:
        assert kept is not None
        kept.checksums()  # of the bytes as published
        kept.bucket(3)[5] ^= 1
    result, _ = await deliver(ranks.sender, ranks.receivers, transfer_to(ranks.sender.address, MEMBERS, 0, 0))
    assert not result.ok and result.missing == [] and "bucket 3 arrived damaged at n0" in result.reason
    assert_delivered(*await ranks.publish_and_deliver(1, number=1, group=2), 1)


async def test_fewer_buckets_than_sources_leave_some_without_work() -> None:
    sources = tuple(f"learner-{rank}" for rank in range(40))
    sender = make_sender(sources=sources)
    publish_share(sender, 0)
    with sender.shelf.pinned(0) as kept:
        assert kept is not None and 3 < len(kept.buckets) < len(sources)
        buckets = len(kept.buckets)
    others = [make_source(number, sources) for number in range(1, buckets)]  # the rest is not even there
    receiver = make_receiver("n0")
    serving = [asyncio.ensure_future(source.serve(sender.address)) for source in others]
    for source in others:
        publish_share(source, 0)
    result, [end] = await deliver(sender, [receiver], transfer_to(sender.address, ["n0"], 0, 0))
    assert_delivered(result, [end], 0)
    for source in others:
        source.close()
    sender.close()
    receiver.close()
    await asyncio.gather(*serving)


@pytest.mark.processes
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_a_source_killed_or_frozen_in_the_middle_is_named_and_its_successor_goes_on(number: signal.Signals) -> None:
    """A killed one must be noticed long before the deadline, a frozen one by it; nobody gets anything of that transfer."""
    sender = make_sender(sources=SOURCES, roll_call_seconds=1.0)
    receivers = [make_receiver(name) for name in MEMBERS]
    layers = 600  # more than the sockets between them hold
    publish_share(sender, 0, layers)
    seconds = BEYOND if number is signal.SIGKILL else 6.0
    transfer = transfer_to(sender.address, MEMBERS, number=0, step=0, deadline_seconds=seconds)
    async with asyncio.timeout(WATCHDOG):
        async with started("source") as peer:
            peer.tell(address=sender.address, layers=layers, halt=True)
            running = asyncio.ensure_future(deliver(sender, receivers, transfer))
            await peer.hear("published")
            await peer.hear("halted")
            peer.signal(number)
            result, ends = await running
            assert not result.ok and result.missing == ["learner-1"], result.reason
            assert "learner-1 took part and is silent since the broadcast broke" in result.reason
            assert all(isinstance(end, str) and "learner-1" in end for end in ends)
        async with started("source") as successor:
            successor.tell(address=sender.address)
            await successor.hear("published")
            publish_share(sender, 0)
            again = transfer_to(sender.address, MEMBERS, number=1, step=0, group=2)
            assert_delivered(*await deliver(sender, receivers, again), 0)
    sender.close()
    for receiver in receivers:
        receiver.close()


def test_the_source_satisfies_its_port() -> None:
    kind: type[FurtherSource] = TorchSource
    assert kind is not None and TorchSender is not None and TorchReceiver is not None
