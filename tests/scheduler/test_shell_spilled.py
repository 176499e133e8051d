"""Leases of episodes whose logs lie on disk: nobody waits for the disk but the node that gets the lease."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
from shell_world import ShellWorld, run
from test_shell_protocol import Hand, delta, ready

from scheduler.core import events as e
from segue.errors import RunFailed
from segue.ports import rollout as rollout_port

T = TypeVar("T")
PAYLOADS = [b"x" * 300, b"y" * 300]


class SlowDisk:
    """A compute whose work begins only when it is let."""

    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.asked = 0

    async def run(self, work: Callable[[], T], cost: float) -> T:
        self.asked += 1
        await self.gate.wait()
        return work()

    def close(self) -> None:
        pass


async def granted_again(tmp_path: Path) -> tuple[ShellWorld, Hand, rollout_port.Lease, SlowDisk]:
    """The first lease of a node by hand was spilled, and failed; the node has been granted it again, and the disk is slow."""
    world, hand = await ready(tmp_path, queue__bytes=400)
    lease = hand.leases()[0]
    await hand.say(*(delta(lease, seq, payload) for seq, payload in enumerate(PAYLOADS)))
    await asyncio.sleep(1.0)
    assert world.shell.queue.reader(lease.episode).on_disk
    world.shell.compute = disk = SlowDisk()
    await hand.say(rollout_port.Fail(lease.episode, lease.attempt, "env", "crash"))
    return world, hand, lease, disk


def test_who_gets_a_spilled_episode_waits_for_the_disk_and_nobody_else_does(tmp_path: Path) -> None:
    async def course() -> None:
        world, hand, lease, disk = await granted_again(tmp_path)
        assert disk.asked == 1
        before = len(hand.orders)
        for _ in range(5):
            await asyncio.sleep(4.0)
            assert not (await hand.say()).fenced, "heartbeats are answered"
        other = Hand(world, "rollout-1")
        await other.join()
        assert other.orders, "and so are others"
        assert len(hand.orders) == before
        disk.gate.set()
        await asyncio.sleep(0.1)
        again = hand.orders[before]
        assert isinstance(again, rollout_port.Lease)
        assert (again.episode, again.attempt, again.snapshot.deltas) == (lease.episode, 2, PAYLOADS)
        assert again.snapshot.next_seq == 2 and again.sampling == lease.sampling
        await world.stop()

    run(course)


def test_a_lease_withdrawn_before_its_log_was_read_is_never_given(tmp_path: Path) -> None:
    """Its file may be gone by then; and orders keep their numbers."""

    async def course() -> None:
        world, hand, lease, disk = await granted_again(tmp_path)
        before = len(hand.orders)
        await world.shell.commit("stop_run", [e.StopRequested("enough")], b"")
        assert not list((tmp_path / "queue").iterdir())
        disk.gate.set()
        await asyncio.sleep(0.1)
        fresh = hand.orders[before:]
        assert not any(isinstance(order, rollout_port.Lease) and order.episode == lease.episode for order in fresh)
        assert fresh[0] == rollout_port.Drop(lease.episode, 2, "withdrawn") and isinstance(fresh[-1], rollout_port.Stop)
        await world.stop()

    run(course)


def test_a_session_that_ends_while_its_lease_is_read_gets_nothing_of_it(tmp_path: Path) -> None:
    async def course() -> None:
        world, hand, _, disk = await granted_again(tmp_path)
        hand.session, hand.number, hand.seen = 2, 0, 0
        before = len(hand.orders)
        await hand.join()
        disk.gate.set()
        await asyncio.sleep(1.0)
        assert [type(order).__name__ for order in hand.orders[before:]] == ["BeginUpdate"]
        await world.stop()

    run(course)


def test_a_log_that_changed_on_disk_ends_the_run_with_a_sentence(tmp_path: Path) -> None:
    async def course() -> None:
        world, _, _, disk = await granted_again(tmp_path)
        for file in (tmp_path / "queue").iterdir():
            file.write_bytes(b"something else")
        disk.gate.set()
        with pytest.raises(RunFailed, match="has changed since the trajectory queue wrote it"):
            await world.shell.run()
        await world.shell.stop()

    run(course)
