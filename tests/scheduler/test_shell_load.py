"""The load rule of design.md §5: how many messages the scheduler gets and sends depends on the nodes, not on their episodes.

Counted in virtual time, with the nodes' real outboxes; only what an episode does is modelled.
"""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path
from typing import Any

import pytest
from shell_world import Channel, FakeLearner, ShellWorld, run
from test_shell_protocol import Hand, delta, finish

from rollout.outbox import Acknowledged, ExchangeLoop, OrderInbox, Outbox
from segue.clock import now
from segue.metrics.registry import Metrics
from segue.ports import rollout as rollout_port
from segue.ports.rpc import Service

TURNS = 3


class ModelNode:
    """A node whose exchanges are the real ones. Its episodes have three turns of about half a second and say so urgently, as
    an episode's end and a paused request are said."""

    def __init__(self, world: ShellWorld, index: int, places: int) -> None:
        self.name = f"rollout-{index}"
        self.world = world
        self.random = random.Random(index)
        self.version = -1
        self.tasks: set[asyncio.Task[None]] = set()
        self.up = Channel("scheduler-0", world.shell.handle)
        service = Service()
        service.add(rollout_port.ORDERS, self._orders)
        self.down = Channel(self.name, service.handle)
        self.inbox = OrderInbox(1)
        self.places = places

    def start(self) -> None:
        lease = self.world.config.scheduler.lease_seconds
        self.outbox = Outbox(self.name, 1, rollout_port.NodeInfo(self.places, self.places), lease, now())
        self.exchange = ExchangeLoop(
            self.outbox,
            self.up,
            Metrics("rollout", envs=["latency"]),
            join_seconds=10.0,
            orders_seen=lambda: self.inbox.upto,
            counts=dict,
            settled=self._settled,
        )
        self.world.shell.connect(self.name, self.down)
        self._spawn(self._run())

    async def _run(self) -> None:
        await self.exchange.run()

    def _spawn(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)

    def _settled(self, settled: Acknowledged) -> None:
        assert not settled.fenced and not settled.unfillable

    def _say(self, event: rollout_port.NodeEvent) -> None:
        before = self.outbox.due()
        self.outbox.put(event, now(), urgent=True)
        if self.outbox.due() < before:
            self.exchange.wake()

    async def _orders(self, orders: rollout_port.Orders) -> rollout_port.OrdersSeen:
        for order in self.inbox.take(orders):
            if isinstance(order, rollout_port.Lease):
                self._spawn(self._episode(order))
            elif isinstance(order, rollout_port.BeginUpdate):
                self._spawn(self._update(order))
        return rollout_port.OrdersSeen(1, self.inbox.upto)

    async def _update(self, order: rollout_port.BeginUpdate) -> None:
        await asyncio.sleep(0.3)
        self.version = order.transfer.version
        self._say(rollout_port.Loaded(order.update, order.transfer.version, 0.1, 0.0, 0.1))

    async def _episode(self, lease: rollout_port.Lease) -> None:
        log: list[bytes] = []
        for turn in range(TURNS):
            await asyncio.sleep(self.random.uniform(0.2, 0.8))
            log.append(json.dumps({"episode": lease.episode, "seq": turn, "version": self.version}).encode())
            self._say(delta(lease, turn, log[-1], self.version))
        self._say(finish(lease, log))


async def messages(folder: Path, nodes: int, places: int, seconds: float, **sections: Any) -> tuple[int, int]:
    """(calls from and to the scheduler, episodes trained) in so many seconds after the start."""
    groups = nodes * places // 10
    world = ShellWorld(
        folder, nodes=0, task_count=5000, steps=10_000, batch__groups=groups, envpool__workers=64, rollout__nodes=nodes,
        rollout__max_episodes=places, rollout__slots=places, **sections,
    )  # fmt: skip
    world.nodes.clear()
    models = [ModelNode(world, index, places) for index in range(nodes)]
    world.learner = FakeLearner(world.shell, world.config)
    await world.start()
    for model in models:
        model.start()
    training = asyncio.get_running_loop().create_task(world.learner.train(10_000))
    await asyncio.sleep(10.0)
    channels = [world.learner.up, world.learner.down, *(c for model in models for c in (model.up, model.down))]
    calls, trained = sum(channel.calls for channel in channels), len(world.learner.batches)
    await asyncio.sleep(seconds)
    calls, trained = sum(channel.calls for channel in channels) - calls, len(world.learner.batches) - trained
    assert not training.done(), training
    for task in [training, *(task for model in models for task in model.tasks)]:
        task.cancel()
    assert not world.shell.failed, world.shell.stopped
    await world.stop()
    return calls, trained * groups * world.config.group.size


def test_ten_times_the_episodes_make_no_more_messages(tmp_path: Path) -> None:
    async def course() -> None:
        few, trained_few = await messages(tmp_path / "few", 2, 30, 8.0)
        many, trained_many = await messages(tmp_path / "many", 2, 300, 8.0)
        assert trained_many > 5 * trained_few > 0, "they do ten times the work"
        assert many <= 1.05 * few
        assert many <= 500 * 8.0 * 0.2, "two nodes are far from the limit"

    run(course)


@pytest.mark.parametrize("places", [10, 50])
def test_the_limit_holds_with_many_nodes_whatever_they_do(tmp_path: Path, places: int) -> None:
    """Ten nodes that each want to say something all the time, and a limit of 40 messages a second."""

    async def course() -> None:
        calls, trained = await messages(tmp_path, 10, places, 15.0, scheduler__messages_per_second=40.0)
        assert trained > 0
        assert calls <= 40.0 * 15.0

    run(course)


def test_a_node_that_does_not_keep_its_distance_is_held_to_it(tmp_path: Path) -> None:
    """One that flushes every 25 ms, or at once, gets its replies no sooner than it was told to flush."""

    async def course() -> None:
        world = ShellWorld(tmp_path, nodes=0)
        await world.start()
        hand = Hand(world)
        reply = await hand.join()
        begin, count = now(), 0
        while now() < begin + 10.0:
            await hand.say()
            count += 1
        assert 80 <= count <= 10.0 / reply.flush_after + 1
        await world.stop()

    run(course)


def test_orders_gather_and_the_first_after_a_silence_goes_at_once(tmp_path: Path) -> None:
    async def course() -> None:
        world = ShellWorld(tmp_path, nodes=0, scheduler__messages_per_second=10.0)
        await world.start()
        hand = Hand(world)
        await hand.join()
        link = world.shell.exchanges.link(hand.name)
        await asyncio.sleep(5.0)
        begin, before = now(), len(hand.pushes)
        for number in range(100):
            link.order(1, rollout_port.Extend(number, 1, 5))
            await asyncio.sleep(0.01)
            if number == 0:
                assert len(hand.pushes) == before + 1, "at once"
        await asyncio.sleep(1.0)
        assert len(hand.orders) == 100 and link.waiting == 0
        assert len(hand.pushes) - before <= (now() - begin) / world.shell.exchanges.order_after() + 1
        many = [rollout_port.Extend(number, 1, 5) for number in range(3000)]
        pushes, begin = len(hand.pushes), now()
        for order in many:
            link.order(1, order)
        await asyncio.sleep(1.0)
        assert len(hand.pushes) == pushes + 3 and hand.orders[-1] == many[-1], "what does not fit into one goes right after it"
        await world.stop()

    run(course)
