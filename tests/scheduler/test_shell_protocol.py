"""The shell's promises to each caller: exchanges, orders, batches, events, the journal, and what happens when something fails."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from typing import Any

import pytest
from shell_world import Channel, ShellWorld, run

from segue import wire
from segue.clock import LogicalLoop, now
from segue.episode import log_checksum
from segue.errors import RunFailed, UserError
from segue.ports import driver as driver_port
from segue.ports import learner as learner_port
from segue.ports import rollout as rollout_port
from segue.ports.journal import MemoryJournal, Record
from segue.ports.rpc import Done, PeerTimeout, RemoteError, Service, ask

INFO = rollout_port.NodeInfo(4, 4)


class Hand:
    """A node moved by hand: every exchange is written in the test."""

    def __init__(self, world: ShellWorld, name: str = "rollout-0") -> None:
        self.world = world
        self.name = name
        self.session = 1
        self.number = 0
        self.seen = 0
        self.orders: list[rollout_port.Order] = []
        self.pushes: list[rollout_port.Orders] = []
        self.deaf = False
        service = Service()
        service.add(rollout_port.ORDERS, self._orders)
        world.shell.connect(name, Channel(name, service.handle))

    async def _orders(self, orders: rollout_port.Orders) -> rollout_port.OrdersSeen:
        self.pushes.append(orders)
        if not self.deaf:
            fresh = orders.orders[self.seen - orders.first :]
            self.orders += fresh
            self.seen += len(fresh)
        return rollout_port.OrdersSeen(self.session, self.seen)

    async def say(
        self, *events: rollout_port.NodeEvent, info: rollout_port.NodeInfo | None = None, number: int | None = None
    ) -> rollout_port.ExchangeReply:
        if number is None:
            number = self.number
            self.number += 1
        exchange = rollout_port.Exchange(self.name, self.session, number, list(events), self.seen, info)
        reply = await ask(self.world.driver, rollout_port.EXCHANGE, exchange, 100.0)
        await asyncio.sleep(0)
        await asyncio.sleep(0.01)
        return reply

    async def join(self) -> rollout_port.ExchangeReply:
        return await self.say(info=INFO)

    def leases(self) -> list[rollout_port.Lease]:
        return [order for order in self.orders if isinstance(order, rollout_port.Lease)]

    async def load(self) -> None:
        """Load what was ordered last."""
        begin = [order for order in self.orders if isinstance(order, rollout_port.BeginUpdate)][-1]
        await self.say(rollout_port.Loaded(begin.update, begin.transfer.version, 0.1, 0.0, 0.1))


async def ready(tmp_path: Path, **sections: Any) -> tuple[ShellWorld, Hand]:
    """A world with one node by hand, at version 0, training opened."""
    world = ShellWorld(tmp_path, nodes=0, **sections)
    await world.start()
    hand = Hand(world)
    await hand.join()
    await world.learner.publish()
    await asyncio.sleep(1.0)
    await hand.load()
    assert hand.leases()
    return world, hand


def delta(lease: rollout_port.Lease, seq: int, payload: bytes = b"payload", version: int = 0) -> rollout_port.Delta:
    head = rollout_port.DeltaHead(lease.episode, lease.attempt, seq, seq, ((version, 3),), record=True)
    return rollout_port.Delta(head, payload)


def finish(lease: rollout_port.Lease, payloads: list[bytes], checksum: int | None = None) -> rollout_port.Finish:
    value = log_checksum(payloads) if checksum is None else checksum
    return rollout_port.Finish(lease.episode, lease.attempt, len(payloads), "terminated", len(payloads), 0.0, value, 1.0)


def test_a_deadline_that_has_passed_is_armed_once_on_any_loop(tmp_path: Path) -> None:
    """uvloop's `call_at` gives a handle without a time where the time has come already; a busy machine is late for a deadline."""

    class Loop(LogicalLoop):
        def call_at(self, when: float, callback: Any, *args: Any, context: Any = None) -> Any:  # type: ignore[override]
            if when <= self.time():
                return self.call_soon(callback, *args, context=context)
            return super().call_at(when, callback, *args, context=context)

    async def course() -> None:
        world, _ = await ready(tmp_path)
        shell = world.shell
        shell.core.tables.timers.arm("rest", "rollout-9", now() - 1.0)
        shell._arm()
        first = shell._timer
        assert not hasattr(first, "when")
        shell._arm()
        assert shell._timer is first, "it is armed already"
        await asyncio.sleep(0.1)
        assert shell._timer is not first and not shell.failed
        await world.stop()

    with asyncio.Runner(loop_factory=Loop) as runner:
        runner.run(course())


# --- exchanges --------------------------------------------------------------------------------------------------------


def test_a_repeated_exchange_gets_its_reply_and_is_not_taken_in_twice(tmp_path: Path) -> None:
    async def course() -> None:
        world, hand = await ready(tmp_path)
        lease = hand.leases()[0]
        number = hand.number
        first = await hand.say(delta(lease, 0))
        again = await hand.say(delta(lease, 0), number=number)
        assert first == again
        assert world.shell.queue.count(lease.episode) == 1
        status = await world.status()
        assert status["counts"]["refused"] == {"duplicate": 1}
        await world.stop()

    run(course)


def test_a_gap_is_asked_for_again(tmp_path: Path) -> None:
    async def course() -> None:
        world, hand = await ready(tmp_path)
        lease = hand.leases()[0]
        reply = await hand.say(delta(lease, 1), delta(lease, 2), finish(lease, [b"payload"] * 3))
        assert reply.resend == [(lease.episode, lease.attempt, 0)]
        assert not reply.refused
        assert world.shell.queue.count(lease.episode) == 0
        reply = await hand.say(delta(lease, 0), delta(lease, 1), delta(lease, 2), finish(lease, [b"payload"] * 3))
        assert not reply.resend and not reply.refused
        assert world.shell.queue.count(lease.episode) == 3
        await world.stop()

    run(course)


def test_f54_what_belongs_to_an_old_attempt_is_refused_and_counted(tmp_path: Path) -> None:
    async def course() -> None:
        world, hand = await ready(tmp_path)
        lease = hand.leases()[0]
        await hand.say(delta(lease, 0), rollout_port.Fail(lease.episode, 1, "env", "crash"))
        again = hand.leases()[-1]
        assert (again.episode, again.attempt, again.snapshot.deltas) == (lease.episode, 2, [b"payload"])
        reply = await hand.say(delta(lease, 1), rollout_port.Paused(lease.episode, 1, "update"), finish(lease, [b"payload"]))
        assert reply.refused == [(lease.episode, 1)]
        assert world.shell.queue.count(lease.episode) == 1
        assert (await world.status())["counts"]["refused"]["stale_attempt"] == 3
        await world.stop()

    run(course)


def test_an_old_session_an_unknown_one_and_a_wrong_number_are_fenced(tmp_path: Path) -> None:
    async def course() -> None:
        world, hand = await ready(tmp_path)
        hand.session = 2
        assert (await hand.say(number=0)).fenced, "a session begins with its info"
        assert not (await hand.say(info=INFO, number=0)).fenced
        hand.session = 1
        assert (await hand.say()).fenced
        hand.session = 2
        assert (await hand.say(number=5)).fenced, "it has had replies that we never gave"
        assert (await hand.say(number=6)).fenced
        hand.session, hand.seen = 2, 0
        assert (await hand.say(info=INFO, number=0)).fenced
        hand.session = 3
        assert not (await hand.say(info=INFO, number=0)).fenced
        await world.stop()

    run(course)


def test_another_process_with_the_same_name_and_session_is_fenced(tmp_path: Path) -> None:
    async def course() -> None:
        world, hand = await ready(tmp_path)
        await hand.say()
        assert (await hand.say(info=INFO, number=0)).fenced
        with pytest.raises(RemoteError, match="max_episodes = 0"):
            hand.session = 7
            await hand.say(info=rollout_port.NodeInfo(0, 0), number=0)
        await world.stop()

    run(course)


def test_a_checksum_that_does_not_match_fails_the_attempt(tmp_path: Path) -> None:
    async def course() -> None:
        world, hand = await ready(tmp_path)
        lease = hand.leases()[0]
        await hand.say(delta(lease, 0, b"abc"), finish(lease, [b"abd"]))
        assert (await world.status())["counts"]["attempts_failed"] == {"infra|checksum": 1}
        await asyncio.sleep(3.0)
        await hand.say(rollout_port.Fail(hand.leases()[-1].episode, 1, "data", "makes room"))
        again = next(order for order in hand.leases() if order.episode == lease.episode and order.attempt == 2)
        assert again.snapshot.deltas == [], "what the node sampled on is not what is stored: it begins anew"
        await hand.say(delta(again, 0, b"abc"), finish(again, [b"abc"]))
        assert world.shell.core.tables.tally["finished", "latency", "terminated"] == 1
        await world.stop()

    run(course)


def test_a_lease_goes_on_from_the_whole_log(tmp_path: Path) -> None:
    async def course() -> None:
        world, hand = await ready(tmp_path, rollout__slice_tokens=100, rollout__max_episodes=1)
        lease = hand.leases()[0]
        assert lease.slice_tokens == 100
        await hand.say(delta(lease, 0, b"one"), delta(lease, 1, b"two"))
        other = Hand(world, "rollout-1")
        await other.join()
        await asyncio.sleep(14.0)
        await other.say()
        await asyncio.sleep(10.0)
        await other.say()
        await asyncio.sleep(1.0)
        await other.load()
        moved = [again for again in other.leases() if again.episode == lease.episode]
        assert moved and moved[0].attempt == 2
        snapshot = moved[0].snapshot
        assert (snapshot.turn, snapshot.next_seq, snapshot.deltas) == (1, 2, [b"one", b"two"])
        assert snapshot.seconds == pytest.approx(0.01), "the wall time until its last delta"
        assert moved[0].sampling == lease.sampling, "another attempt samples with the same seed"
        await world.stop()

    run(course)


def test_message_load_stays_within_the_rate_whatever_nodes_do(tmp_path: Path) -> None:
    """design.md §5: flush intervals grow with the nodes, and even urgent flushes are spaced."""

    async def course() -> None:
        world = ShellWorld(tmp_path, nodes=0, scheduler__messages_per_second=20.0)
        await world.start()
        hands = [Hand(world, f"rollout-{i}") for i in range(10)]
        replies = [await hand.join() for hand in hands]
        assert replies[-1].flush_after >= 10 / 20.0
        begin = now()

        async def busy(hand: Hand) -> int:
            count = 0
            while now() < begin + 30.0:
                await hand.say()
                count += 1
            return count

        counts = await asyncio.gather(*map(busy, hands))
        assert sum(counts) <= 20.0 * 30.0
        assert min(counts) > 20, "every node has its share"
        await world.stop()

    run(course)


# --- orders -----------------------------------------------------------------------------------------------------------


def test_orders_are_sent_again_until_they_are_seen_one_batch_at_a_time(tmp_path: Path) -> None:
    async def course() -> None:
        world, hand = await ready(tmp_path)
        before = len(hand.orders)
        lease = hand.leases()[0]
        hand.deaf = True
        pushes = len(hand.pushes)
        await hand.say(rollout_port.Fail(lease.episode, lease.attempt, "env", "crash"))
        await asyncio.sleep(3.0)
        repeated = hand.pushes[pushes:]
        assert len(repeated) > 2 and len({push.first for push in repeated}) == 1
        hand.deaf = False
        await asyncio.sleep(1.0)
        assert len(hand.orders) > before
        assert world.shell.exchanges.link("rollout-0").waiting == 0
        count = len(hand.pushes)
        await asyncio.sleep(3.0)
        assert len(hand.pushes) == count, "nothing runs while nothing waits"
        await world.stop()

    run(course)


def test_orders_that_an_exchange_acknowledged_are_not_sent_again(tmp_path: Path) -> None:
    async def course() -> None:
        world, hand = await ready(tmp_path)
        lease = hand.leases()[0]
        hand.deaf = True
        await hand.say(rollout_port.Fail(lease.episode, lease.attempt, "env", "crash"))
        hand.seen += world.shell.exchanges.link("rollout-0").waiting
        await hand.say()
        assert world.shell.exchanges.link("rollout-0").waiting == 0
        await world.stop()

    run(course)


def test_orders_of_an_old_session_are_void_in_a_new_one(tmp_path: Path) -> None:
    async def course() -> None:
        world, hand = await ready(tmp_path)
        hand.deaf = True
        await hand.say(*(rollout_port.Fail(lease.episode, lease.attempt, "data", "broken") for lease in hand.leases()[:2]))
        assert world.shell.exchanges.link("rollout-0").waiting
        before = len(hand.orders)
        hand.session, hand.number, hand.seen, hand.deaf = 2, 0, 0, False
        await hand.join()
        await asyncio.sleep(2.0)
        fresh = hand.orders[before:]
        assert [type(order).__name__ for order in fresh] == ["BeginUpdate"], "weights first, and no lease of the old session"
        await world.stop()

    run(course)


# --- batches and events -----------------------------------------------------------------------------------------------


def test_f62_an_empty_queue_is_waited_for_and_asked_again(tmp_path: Path) -> None:
    async def course() -> None:
        world = ShellWorld(tmp_path, nodes=0)
        await world.start()
        begin = now()
        reply = await ask(world.driver, learner_port.TAKE_BATCH, learner_port.TakeBatch(0, 0, 7.5), 100.0)
        assert reply == learner_port.BatchReply(None, "")
        assert now() - begin == pytest.approx(7.5)
        await world.stop()

    run(course)


def test_every_rank_gets_the_same_bytes_at_once(tmp_path: Path) -> None:
    async def course() -> None:
        world = ShellWorld(tmp_path)
        await world.start()
        await world.learner.publish()
        body = wire.encode(learner_port.TakeBatch(0, 0, 60.0))
        replies = await asyncio.gather(*(world.shell.handle("take_batch", body) for _ in range(3)))
        assert len(set(replies)) == 1
        batch = wire.decode(replies[0], learner_port.BatchReply).batch
        assert batch is not None and batch.step == 0
        late = await world.shell.handle("take_batch", body)
        assert late == replies[0], "asking again, after a lost reply, changes nothing"
        await world.stop()

    run(course)


def test_stop_releases_every_waiter_with_the_reason(tmp_path: Path) -> None:
    """F57, F62: nobody is left waiting."""

    async def course() -> None:
        world, hand = await ready(tmp_path)
        waiter = asyncio.create_task(ask(world.driver, learner_port.TAKE_BATCH, learner_port.TakeBatch(0, 0, 1000.0), 2000.0))
        watcher = asyncio.create_task(ask(world.driver, driver_port.WATCH_EVENTS, driver_port.WatchEvents(1, 1000.0), 2000.0))
        await asyncio.sleep(1.0)
        await ask(world.driver, driver_port.STOP_RUN, driver_port.StopRun("enough"), 10.0)
        assert (await waiter).stop == "enough"
        assert [(event.what, event.data) for event in (await watcher).events] == [("stopped", {"reason": "enough"})]
        await asyncio.sleep(1.0)
        assert isinstance(hand.orders[-1], rollout_port.Stop)
        states = (await world.status())["episodes"]["states"]
        assert states["leased"] == states["pending"] == 0 and states["dropped"] > 0
        await world.stop()

    run(course)


def test_events_are_kept_until_they_are_acknowledged(tmp_path: Path) -> None:
    async def course() -> None:
        world = ShellWorld(tmp_path, steps=3)
        await world.start()
        await world.learner.train(3)
        events = await world.events()
        assert [event.data["step"] for event in events if event.what == "step"] == [0, 1, 2]
        assert [event.number for event in events] == list(range(1, len(events) + 1))
        assert await world.events() == events, "a lost reply is asked for again"
        assert await world.events(after=events[1].number) == events[2:]
        assert {"update", "step"} <= {event.what for event in events}
        await world.stop()

    run(course)


def test_a_learner_report_that_cannot_be_is_answered_with_an_error(tmp_path: Path) -> None:
    async def course() -> None:
        world, _ = await ready(tmp_path)
        calls: list[tuple[Any, Any]] = [
            (learner_port.TRAINED, learner_port.TrainedReport(3, {}, [], False)),
            (learner_port.COMMITTED, learner_port.Committed(4)),
            (learner_port.PUBLISH, learner_port.Publish(7, "x")),
            (driver_port.EVAL_STATE, driver_port.EvalState("nobody")),
        ]
        for rpc, request in calls:
            with pytest.raises(RemoteError):
                await ask(world.driver, rpc, request, 10.0)
        assert not world.shell.failed
        await world.stop()

    run(course)


def test_publishing_again_after_a_lost_reply_gives_the_same_version(tmp_path: Path) -> None:
    async def course() -> None:
        world, _ = await ready(tmp_path)
        await world.learner.publish()
        assert world.learner.versions == [0, 0]
        await world.stop()

    run(course)


# --- the journal ------------------------------------------------------------------------------------------------------


class SlowJournal(MemoryJournal):
    """Returns from `append` only when it is let."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()

    async def append(self, records: list[Record]) -> None:
        await self.gate.wait()
        await super().append(records)


def test_nothing_is_acknowledged_or_ordered_before_the_journal_has_it(tmp_path: Path) -> None:
    async def course() -> None:
        journal = SlowJournal()
        world, hand = await ready(tmp_path, journal=journal)
        lease, before = hand.leases()[0], len(hand.orders)
        journal.gate.clear()
        events: list[rollout_port.NodeEvent] = [delta(lease, 0), rollout_port.Fail(lease.episode, lease.attempt, "env", "crash")]
        exchange = asyncio.create_task(hand.say(*events))
        await asyncio.sleep(2.0)
        assert not exchange.done() and len(hand.orders) == before
        journal.gate.set()
        await exchange
        assert len(hand.orders) > before
        assert [record.method for record in journal.records][-1] == "exchange"
        decoded = wire.decode(journal.records[-1].body, rollout_port.Exchange)
        assert decoded.events == events
        await world.stop()

    run(course)


def test_effects_leave_in_the_order_of_the_decisions(tmp_path: Path) -> None:
    """Two exchanges wait for the journal at once: the lease of the first is not overtaken by the drop of the second."""

    async def course() -> None:
        journal = SlowJournal()
        world, hand = await ready(tmp_path, journal=journal, scheduler__retries_env=1)
        lease, before = hand.leases()[0], len(hand.orders)
        journal.gate.clear()
        first = asyncio.create_task(hand.say(delta(lease, 0), rollout_port.Fail(lease.episode, 1, "env", "crash")))
        stop = asyncio.create_task(ask(world.driver, driver_port.STOP_RUN, driver_port.StopRun("enough"), 100.0))
        await asyncio.sleep(1.0)
        journal.gate.set()
        await asyncio.gather(first, stop)
        await asyncio.sleep(1.0)
        kinds = [type(order).__name__ for order in hand.orders[before:]]
        assert kinds.index("Lease") < kinds.index("Drop") and kinds[-1] == "Stop"
        await world.stop()

    run(course)


# --- failures ---------------------------------------------------------------------------------------------------------


async def fails_with(world: ShellWorld, match: str, part: str) -> None:
    """The run ends with one sentence; everybody who waits learns it. No `part`: it is the user's to mend."""
    waiter = asyncio.create_task(ask(world.driver, learner_port.TAKE_BATCH, learner_port.TakeBatch(99, 0, 5000.0), 9000.0))
    with pytest.raises((RunFailed, UserError), match=match) as caught:
        async with asyncio.timeout(3000.0):
            await world.shell.run()
    sentence, users = str(caught.value), isinstance(caught.value, UserError)
    assert users == (part == "") and "\n" not in sentence
    assert (await waiter).stop == sentence
    fatal = [event.data for event in await world.events() if event.what == "fatal"]
    if users:
        assert fatal == [{"part": "scheduler", "sentence": sentence, "users": True}]
    else:
        assert fatal == [{"part": part, "sentence": sentence}]
    for node in world.nodes:
        node.die()
    await world.shell.stop()


def test_an_unreachable_learner_ends_the_run_with_a_sentence(tmp_path: Path) -> None:
    async def course() -> None:
        world = ShellWorld(tmp_path)
        await world.start()
        await world.learner.publish()
        world.learner.down.cut_off = True
        await fails_with(world, r"Version 0 \(step 0\) reached no rollout node in 5 attempts", "weightsync")

    run(course)


def test_a_sender_that_never_answers_does_not_hang_the_run(tmp_path: Path) -> None:
    async def course() -> None:
        world = ShellWorld(tmp_path)
        world.learner.sends = False
        for node in world.nodes:
            node.ignores_updates = True
        await world.start()
        await world.learner.publish()
        await fails_with(world, "reached no rollout node", "weightsync")

    run(course)


def test_a_run_whose_nodes_are_all_gone_ends_with_a_sentence(tmp_path: Path) -> None:
    async def course() -> None:
        world = ShellWorld(tmp_path)
        await world.start()
        training = asyncio.create_task(world.learner.train(50))
        await asyncio.sleep(5.0)
        for node in world.nodes:
            node.die()
        await fails_with(world, "No rollout node has been heard of", "rollout")
        await training
        assert "No rollout node" in world.learner.stopped

    run(course)


def test_f58_tasks_that_fail_on_every_attempt_end_the_run_when_they_are_all(tmp_path: Path) -> None:
    async def course() -> None:
        world = ShellWorld(tmp_path, task_count=3)

        for node in world.nodes:
            node.fails_with = ("data", "no answer in the task")
        await world.start()
        await world.learner.publish()
        await fails_with(world, "All 3 tasks failed on every attempt, .*: mend the environment or its data", "")

    run(course)


def test_a_full_disk_ends_the_run_with_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def course() -> None:
        world = ShellWorld(tmp_path, queue__bytes=200)
        await world.start()
        await world.learner.publish()
        real = os.replace

        def full(source: Any, target: Any) -> None:
            if "spill" in str(target):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            real(source, target)

        monkeypatch.setattr(os, "replace", full)
        await fails_with(world, r"could not write .*\(No space left on device\)", "scheduler")

    run(course)


def test_spilled_batches_arrive_whole_and_their_files_go_when_they_are_committed(tmp_path: Path) -> None:
    async def course() -> None:
        world = ShellWorld(tmp_path, queue__bytes=600, steps=6)
        for node in world.nodes:
            node.payload_bytes = 150
        world.learner.commit_every = 2
        await world.start()
        await world.learner.train(6)
        assert world.shell.queue.spilled_bytes > 0
        assert world.shell.queue.memory_bytes <= 600
        status = await world.status()
        assert status["committed"] == 6 and status["queue"]["batches"] == 0
        assert len(world.shell.queue) == 0 and not list((tmp_path / "queue").iterdir())
        await world.stop()
        assert world.metrics.value("segue_queue_spilled_bytes_total") == world.shell.queue.spilled_bytes

    run(course)


def test_f60_a_failing_background_task_ends_the_run(tmp_path: Path) -> None:
    async def course() -> None:
        world = ShellWorld(tmp_path)

        class Broken:
            name = "rollout-0"

            async def call(self, method: str, body: bytes, timeout: float) -> bytes:
                raise RuntimeError("a mistake of ours")

        await world.start()
        world.shell.connect("rollout-0", Broken())
        await world.learner.publish()
        await fails_with(world, "RuntimeError: a mistake of ours", "scheduler")

    run(course)


def test_a_lost_send_request_is_tried_again_under_another_transfer(tmp_path: Path) -> None:
    async def course() -> None:
        world = ShellWorld(tmp_path, steps=3)
        await world.start()
        lost = {"left": 2}
        handle = world.learner.service.handle

        async def sometimes(method: str, body: bytes) -> bytes:
            if lost["left"]:
                lost["left"] -= 1
                raise PeerTimeout("lost")
            return await handle(method, body)

        world.shell.connect("learner-0", Channel("learner-0", sometimes))
        await world.learner.train(3)
        assert world.learner.transfers[0].transfer == 3
        assert (await world.status())["counts"]["rpc_failures"] == {"timeout": 2}
        await world.stop()

    run(course)


def test_unknown_calls_and_garbage_are_answered(tmp_path: Path) -> None:
    async def course() -> None:
        world = ShellWorld(tmp_path)
        await world.start()
        for method, body in (("nonsense", b""), ("exchange", b"garbage"), ("take_batch", b"garbage")):
            reply = await world.shell.handle(method, body)
            with pytest.raises(wire.UnknownMessage):
                wire.decode(reply, Done)
        assert not world.shell.failed
        await world.stop()

    run(course)
