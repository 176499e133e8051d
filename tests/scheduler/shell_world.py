"""Fake peers for the scheduler's shell: nodes and a learner on one logical loop, over a channel that loses and repeats."""

from __future__ import annotations

import asyncio
import json
import random
import zlib
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, TypeVar

from core_world import make_config, task

from scheduler.shell import SchedulerShell
from segue import wire
from segue.clock import LogicalCompute, LogicalLoop, now
from segue.config import Config
from segue.episode import log_checksum
from segue.metrics.registry import Metrics
from segue.metrics.states import StateClock
from segue.metrics.vocabulary import STATES
from segue.ports import driver as driver_port
from segue.ports import learner as learner_port
from segue.ports import rollout as rollout_port
from segue.ports import transfer as transfer_port
from segue.ports.journal import MemoryJournal
from segue.ports.rpc import Done, PeerLost, PeerTimeout, Service, ask

T = TypeVar("T")


def run(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run on a fresh logical loop: no second of wall time passes in any wait."""
    with asyncio.Runner(loop_factory=LogicalLoop) as runner:
        return runner.run(work())


class Channel:
    """Calls a handler in-process; loses requests and replies and repeats calls with the given chances, by a seed."""

    def __init__(self, name: str, handle: Callable[[str, bytes], Any], loss: float = 0.0, seed: int = 0) -> None:
        self.name = name
        self._handle = handle
        self._loss = loss
        self._random = random.Random(seed)
        self.cut_off = False
        self.calls = 0

    async def call(self, method: str, body: bytes, timeout: float) -> bytes:
        self.calls += 1
        if self.cut_off:
            raise PeerLost(self.name)
        if self._random.random() < self._loss:
            await asyncio.sleep(timeout)
            raise PeerTimeout(f"{self.name}: the request was lost")
        try:
            async with asyncio.timeout(timeout):
                reply: bytes = await self._handle(method, body)
        except TimeoutError:
            raise PeerTimeout(self.name) from None
        if self._random.random() < self._loss:
            await self._handle(method, body)
        if self._random.random() < self._loss:
            await asyncio.sleep(timeout)
            raise PeerTimeout(f"{self.name}: the reply was lost")
        return reply


class Broadcasts(dict[int, asyncio.Event]):
    """Which transfers the learner has sent: nodes have nothing to load before."""

    def of(self, transfer: int) -> asyncio.Event:
        return self.setdefault(transfer, asyncio.Event())


class FakeNode:
    """A rollout node that samples nothing but keeps the protocol: deltas of `turns` turns, then a finish."""

    def __init__(
        self, name: str, shell: SchedulerShell, config: Config, loss: float = 0.0, turns: int = 3, places: int = 4
    ) -> None:
        self.name = name
        self.config = config
        self.turns = turns
        self.places = places
        self.turn_seconds = 0.5
        self.payload_bytes = 40
        self.session = 0
        self.number = 0
        self.version = -1
        self.orders_seen = 0
        self.orders: list[rollout_port.Order] = []
        self.events: list[rollout_port.NodeEvent] = []
        self.episodes: dict[int, asyncio.Task[None]] = {}
        self.attempts: dict[int, int] = {}
        self.flush = asyncio.Event()
        self.exchanges = 0
        self.fenced = 0
        self.corrupt: set[int] = set()
        self.ignores_updates = False
        self.fails_with: tuple[str, str] | None = None
        self.broadcasts = Broadcasts()
        self.tasks: set[asyncio.Task[None]] = set()
        self.alive = True
        self.up = Channel("scheduler-0", shell.handle, loss, seed=zlib.crc32(name.encode()))
        self.service = Service()
        self.service.add(rollout_port.ORDERS, self._orders)
        self.down = Channel(name, self.service.handle, loss, seed=len(name))
        shell.connect(name, self.down)

    def start(self) -> None:
        self.main = asyncio.get_running_loop().create_task(self._main())

    def die(self) -> None:
        """As by SIGKILL."""
        self.alive = False
        self.main.cancel()
        self._drop_all()
        self.up.cut_off = self.down.cut_off = True

    def _drop_all(self) -> None:
        for work in [*self.episodes.values(), *self.tasks]:
            work.cancel()
        self.episodes.clear()
        self.events.clear()

    async def _main(self) -> None:
        lease, reply = self.config.scheduler.lease_seconds, None
        while True:
            if reply is None or reply.fenced:
                self.fenced += reply is not None
                self._drop_all()
                self.session += 1
                self.number, self.version, self.orders_seen = 0, -1, 0
                info = rollout_port.NodeInfo(self.places, self.places)
            else:
                info = None
                await self._flushed(reply.flush_after, lease / 3)
            events, self.events = self.events, []
            exchange = rollout_port.Exchange(self.name, self.session, self.number, events, self.orders_seen, info)
            reply = await self._until_answered(exchange, lease)
            self.number += 1
            for episode, attempt in reply.refused:
                self._stop(episode, attempt)

    async def _flushed(self, flush_after: float, limit: float) -> None:
        self.flush.clear()
        try:
            async with asyncio.timeout(flush_after if self.events else limit):
                await self.flush.wait()
        except TimeoutError:
            pass

    async def _until_answered(self, exchange: rollout_port.Exchange, lease: float) -> rollout_port.ExchangeReply:
        started = now()
        while True:
            try:
                self.exchanges += 1
                return await ask(self.up, rollout_port.EXCHANGE, exchange, timeout=lease / 10)
            except PeerTimeout:
                if now() - started > 0.8 * lease:
                    return rollout_port.ExchangeReply(exchange.number, [], [], 0.1, lease, fenced=True)

    # --- orders ---------------------------------------------------------------------------------------------------------

    async def _orders(self, orders: rollout_port.Orders) -> rollout_port.OrdersSeen:
        if orders.session == self.session:
            for number, order in enumerate(orders.orders, orders.first):
                assert number <= self.orders_seen, "orders come without gaps"
                if number == self.orders_seen:
                    self.orders_seen += 1
                    self._obey(order)
        return rollout_port.OrdersSeen(self.session, self.orders_seen)

    def _obey(self, order: rollout_port.Order) -> None:
        self.orders.append(order)
        if isinstance(order, rollout_port.Lease):
            if order.attempt > self.attempts.get(order.episode, 0):
                self._stop(order.episode)
                self.attempts[order.episode] = order.attempt
                self.episodes[order.episode] = asyncio.get_running_loop().create_task(self._episode(order))
        elif isinstance(order, rollout_port.Drop):
            self._stop(order.episode, order.attempt)
            self._say(rollout_port.Discarded(order.episode, order.attempt))
        elif isinstance(order, rollout_port.BeginUpdate) and not self.ignores_updates:
            self._background(self._update(order))
        elif isinstance(order, rollout_port.Stop):
            self._drop_all()

    def _background(self, work: Coroutine[Any, Any, None]) -> None:
        background = asyncio.get_running_loop().create_task(work)
        self.tasks.add(background)
        background.add_done_callback(self.tasks.discard)

    def _stop(self, episode: int, attempt: int | None = None) -> None:
        if attempt is None or self.attempts.get(episode) == attempt:
            work = self.episodes.pop(episode, None)
            if work is not None:
                work.cancel()

    async def _update(self, order: rollout_port.BeginUpdate) -> None:
        try:
            async with asyncio.timeout(order.transfer.deadline_seconds):
                await self.broadcasts.of(order.transfer.transfer).wait()
        except TimeoutError:
            self._say(rollout_port.LoadFailed(order.update, order.transfer.version, "transfer", False), urgent=True)
            return
        await asyncio.sleep(0.1)
        self.version = order.transfer.version
        self._say(rollout_port.Loaded(order.update, order.transfer.version, 0.1, 0.0, 0.1), urgent=True)

    def _say(self, event: rollout_port.NodeEvent, urgent: bool = False) -> None:
        self.events.append(event)
        if urgent or len(self.events) == 1:
            self.flush.set()

    # --- an episode -----------------------------------------------------------------------------------------------------

    async def _episode(self, lease: rollout_port.Lease) -> None:
        assert len(lease.snapshot.deltas) == lease.snapshot.next_seq
        log = list(lease.snapshot.deltas)
        for turn in range(lease.snapshot.turn + 1, self.turns):
            if self.fails_with is not None:
                self._say(rollout_port.Fail(lease.episode, lease.attempt, *self.fails_with), urgent=True)
                return
            await asyncio.sleep(self.turn_seconds)
            self._delta(lease, log, turn)
        await asyncio.sleep(0.01 * lease.episode % 0.5)
        reward = float(self.turns * (lease.episode % 2))
        checksum = log_checksum(log) ^ (1 if lease.episode in self.corrupt and lease.attempt == 1 else 0)
        finish = rollout_port.Finish(
            lease.episode, lease.attempt, len(log), "terminated", self.turns, reward, checksum, 1.0, {"success": reward}
        )
        self.episodes.pop(lease.episode, None)
        self._say(finish, urgent=True)

    def _delta(self, lease: rollout_port.Lease, log: list[bytes], turn: int) -> None:
        version, tokens = self.version, 5
        payload = json.dumps(
            {"episode": lease.episode, "attempt": lease.attempt, "seq": len(log), "version": version, "tokens": tokens}
        ).encode()
        payload += b" " * max(0, self.payload_bytes - len(payload))
        head = rollout_port.DeltaHead(
            episode=lease.episode,
            attempt=lease.attempt,
            seq=len(log),
            turn=turn,
            sampled=((version, tokens),),
            record=True,
            reward=float(lease.episode % 2),
        )
        log.append(payload)
        self._say(rollout_port.Delta(head, payload))


class FakeLearner:
    """Trains whatever it is given, and checks it: order of steps, whole logs, ages, groups seen once."""

    def __init__(self, shell: SchedulerShell, config: Config, loss: float = 0.0, first_step: int = 0) -> None:
        self.config = config
        self.shell = shell
        self.step = first_step
        self.train_seconds = 1.0
        self.commit_every = 0
        self.cut_every = 0
        self.cuts: dict[int, bytes] = {}
        self.versions: list[int] = []
        self.batches: list[learner_port.Batch] = []
        self.groups: set[int] = set()
        self.transfers: list[transfer_port.Transfer] = []
        self.sends = True
        self.broadcasts = Broadcasts()
        self.stopped = ""
        self.tasks: set[asyncio.Task[None]] = set()
        self.up = Channel("scheduler-0", shell.handle, loss, seed=77)
        self.service = Service()
        self.service.add(learner_port.SEND_WEIGHTS, self._send)
        self.down = Channel("learner-0", self.service.handle, loss, seed=78)
        shell.connect("learner-0", self.down)

    async def _call(self, rpc: Any, request: Any, timeout: float = 5.0) -> Any:
        while True:
            try:
                return await ask(self.up, rpc, request, timeout)
            except PeerTimeout:
                continue

    async def _send(self, request: learner_port.SendWeights) -> Done:
        known = any(t.transfer == request.transfer.transfer for t in self.transfers)
        if self.sends and not known:
            self.transfers.append(request.transfer)
            work = asyncio.get_running_loop().create_task(self._sent(request.transfer))
            self.tasks.add(work)
        return Done()

    async def _sent(self, transfer: transfer_port.Transfer) -> None:
        await asyncio.sleep(0.2)
        self.broadcasts.of(transfer.transfer).set()
        result = transfer_port.TransferResult(transfer.version, transfer.transfer, True, [], "", 1000, 0.05, 0.2)
        await self._call(learner_port.TRANSFER_RESULT, result)

    async def publish(self) -> None:
        reply = await self._call(learner_port.PUBLISH, learner_port.Publish(self.step, "here:1"))
        self.versions.append(reply.version)

    async def train(self, steps: int) -> None:
        """Train up to step `steps`, publishing after each."""
        if not self.versions:
            await self.publish()
        while self.step < steps:
            batch = await self._take()
            if batch is None:
                return
            self._check(batch)
            await asyncio.sleep(self.train_seconds)
            cut = self.cut_every > 0 and (self.step + 1) % self.cut_every == 0
            reply = await self._call(learner_port.TRAINED, learner_port.TrainedReport(self.step, {"loss": 0.5}, [1, 2], cut))
            self.step += 1
            if cut:
                self.cuts[self.step] = reply.cut
            if self.commit_every and self.step % self.commit_every == 0:
                await self._call(learner_port.COMMITTED, learner_port.Committed(self.step))
            await self.publish()

    async def _take(self) -> learner_port.Batch | None:
        while True:
            reply = await self._call(learner_port.TAKE_BATCH, learner_port.TakeBatch(self.step, 0, 3.0))
            if reply.stop:
                self.stopped = reply.stop
                return None
            batch: learner_port.Batch | None = reply.batch
            if batch is not None:
                return batch

    def _check(self, batch: learner_port.Batch) -> None:
        assert batch.step == self.step
        assert len(batch.groups) == self.config.batch.groups
        self.batches.append(batch)
        for group in batch.groups:
            assert group.group not in self.groups, "a group is delivered once"
            self.groups.add(group.group)
            assert self.config.group.needed <= len(group.members) <= group.size
            for member in group.members:
                deltas = [json.loads(payload) for payload in member.deltas]
                assert [d["seq"] for d in deltas] == list(range(len(deltas))), "the log is whole and in order"
                assert {d["episode"] for d in deltas} == {member.episode}
                versions = [d["version"] for d in deltas]
                assert versions == sorted(versions), "versions within a trajectory never decrease"
                assert set(versions) <= set(batch.version_steps)


class ShellWorld:
    """A shell with its peers."""

    def __init__(
        self,
        folder: Path,
        nodes: int = 2,
        loss: float = 0.0,
        task_count: int = 50,
        cut: bytes | None = None,
        first_step: int = 0,
        journal: Any = None,
        envs: Sequence[str] = ("latency",),
        **sections: Any,
    ) -> None:
        self.config = make_config(task__train_tasks=task_count, **sections)
        self.metrics = Metrics("scheduler", envs=envs)
        self.clock = StateClock(STATES["scheduler"], now)
        self.journal = journal or MemoryJournal()
        tasks = [task(i) for i in range(task_count)]
        self.shell = SchedulerShell(self.config, folder, tasks, self.metrics, self.clock, self.journal, LogicalCompute())
        if cut is not None:
            self.shell.restore(cut)
        self.loss = loss
        self.nodes = [FakeNode(f"rollout-{i}", self.shell, self.config, loss) for i in range(nodes)]
        self.learner = FakeLearner(self.shell, self.config, loss, first_step)
        for node in self.nodes:
            node.broadcasts = self.learner.broadcasts
        self.driver = Channel("scheduler-0", self.shell.handle)

    async def start(self) -> None:
        await self.shell.start()
        for node in self.nodes:
            node.start()
        await ask(self.driver, driver_port.OPEN_TRAINING, driver_port.OpenTraining(self.config.steps), 10.0)

    async def train(self, steps: int) -> None:
        """Start, train, and stop; the shell must not have failed."""
        await self.start()
        async with asyncio.timeout(100_000):
            await self.learner.train(steps)
        await self.stop()

    async def stop(self) -> None:
        for node in self.nodes:
            if node.alive:
                node.die()
        self.shell.core.tables.episodes.check()
        failed = self.shell.failed
        await self.shell.stop()
        assert not failed, self.shell.stopped

    async def status(self) -> dict[str, Any]:
        reply = await ask(self.driver, driver_port.GET_STATUS, driver_port.GetStatus(), 10.0)
        assert wire.decode(wire.encode(reply), driver_port.Status) == reply
        return reply.data

    async def events(self, after: int = 0) -> list[driver_port.RunEvent]:
        return (await ask(self.driver, driver_port.WATCH_EVENTS, driver_port.WatchEvents(after, 0.0), 10.0)).events
