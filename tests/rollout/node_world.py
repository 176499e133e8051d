"""A rollout node among scripted neighbours, on a loop with a logical clock: seconds of waiting take none."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable, Coroutine
from functools import cache
from typing import Any, TypeVar

import chat_tokenizers as made
from fake_engine import FakeEngine, FakeReceiver, Words
from fake_pool import FakePool
from fake_scheduler import FakeScheduler

from rollout.chat import ChatRenderer
from rollout.node import NodeShell
from segue.clock import LogicalLoop, now
from segue.config import Config
from segue.config.root import resolve
from segue.metrics import ActivityClock, Metrics, StateClock
from segue.metrics.vocabulary import ROLLOUT_PRECEDENCE, STATES
from segue.ports.rollout import BeginUpdate, Loaded, LoadFailed
from segue.ports.rpc import PeerLost, PeerTimeout
from segue.ports.transfer import Transfer

T = TypeVar("T")


def run(main: Coroutine[Any, Any, T], seconds: float = 10_000.0) -> T:
    """Run on a logical clock; a test that needs more than so many logical seconds hangs."""

    async def bounded() -> T:
        async with asyncio.timeout(seconds):
            return await main

    with asyncio.Runner(loop_factory=LogicalLoop) as runner:
        return runner.run(bounded())


async def until(condition: Callable[[], bool]) -> None:
    """Let logical milliseconds pass until `condition` holds."""
    while not condition():  # noqa: ASYNC110 — what is waited for is inside the parts under test, and the time is not real
        await asyncio.sleep(0.001)


class Line:
    """A peer in this process whose calls can be disturbed: `disturb(method, n)` says what happens to its n-th call.

    "" passes; "lost" raises PeerLost; "unsent" times out before the far side hears of it, "unanswered" after it did;
    "twice" delivers twice.
    """

    def __init__(
        self, name: str, handle: Callable[[str, bytes], Any], disturb: Callable[[str, int], str] = lambda m, n: ""
    ) -> None:
        self.name = name
        self._handle = handle
        self.disturb = disturb
        self.calls: dict[str, int] = defaultdict(int)

    async def call(self, method: str, body: bytes, timeout: float) -> bytes:
        self.calls[method] += 1
        fate = self.disturb(method, self.calls[method])
        if fate == "lost":
            raise PeerLost(f"{self.name} is gone")
        if fate == "unsent":
            await asyncio.sleep(timeout)
            raise PeerTimeout(f"{self.name} did not answer")
        reply = await self._handle(method, body)
        if fate == "twice":
            reply = await self._handle(method, body)
        if fate == "unanswered":
            await asyncio.sleep(timeout)
            raise PeerTimeout(f"{self.name} did not answer")
        assert isinstance(reply, bytes)
        return reply


@cache
def renderer() -> ChatRenderer:
    return ChatRenderer(made.words())


def word_ids() -> list[int]:
    """Ids of plain words: what a policy samples."""
    return list(range(10, 60))


def words_policy(mean_length: int = 6) -> Words:
    return Words(word_ids(), renderer().close_tokens[-1], mean_length)


def config(**sections: dict[str, Any]) -> Config:
    """A config with small budgets; keyword arguments are tables, merged over the defaults here."""
    data: dict[str, Any] = {
        "steps": 1,
        "task": {"env": "talk"},
        "model": {"path": "none"},
        "rollout": {"nodes": 1, "max_episodes": 16, "max_tokens": 400, "max_turn_tokens": 20, "max_turns": 6},
        "envpool": {"workers": 1, "instances": 64, "step_seconds": 10.0},
    }
    for name, table in sections.items():
        data[name] = {**data.get(name, {}), **table} if isinstance(table, dict) else table
    return resolve(data, "test")


class Node:
    """One shell with its own engine, receiver and metrics."""

    def __init__(self, name: str, config: Config, engine: Any, receiver: Any, session: int = 1) -> None:
        self.name, self.engine, self.receiver = name, engine, receiver
        self.metrics = Metrics("rollout", "0", envs=("talk",))
        self.sync_metrics = Metrics("weightsync", "rollout-0")
        time = asyncio.get_running_loop().time  # readable from outside of the loop, as an exporter does
        self.activity = ActivityClock(ROLLOUT_PRECEDENCE, time)
        self.sync_clock = StateClock(STATES["weightsync"], time)
        self.metrics.attach(self.activity)
        self.began = now()
        self.up: Line  # to the scheduler
        self.env: Line  # to the pool
        self.down: Line  # from the scheduler
        self.push: Line  # from the pool
        self.shell = NodeShell(
            config,
            name,
            engine,
            receiver,
            renderer(),
            metrics=self.metrics,
            sync_metrics=self.sync_metrics,
            activity=self.activity,
            sync_clock=self.sync_clock,
            session=session,
        )


class World:
    """Nodes, one scheduler, one pool, and the lines between them. Use as `async with World(…) as w`."""

    def __init__(self, cfg: Config | None = None, *, nodes: int = 1, policy: Any = None, step: float = 0.01, **pool: Any) -> None:
        self.config = cfg or config()
        self.scheduler = FakeScheduler(lease_seconds=self.config.scheduler.lease_seconds)
        self.pool = FakePool(**pool)
        self._policy = policy or words_policy()
        self._step = step
        self._nodes = nodes
        self.nodes: list[Node] = []
        self.version = 0
        self.updates = 0

    async def __aenter__(self) -> World:
        for i in range(self._nodes):
            await self.add_node(f"rollout-{i}")
        return self

    async def add_node(self, name: str, session: int = 1, engine: Any = None, receiver: Any = None) -> Node:
        """Start a node and give it the newest weights."""
        engine = engine or FakeEngine(self._policy, renderer().text, step=self._step)
        node = Node(name, self.config, engine, receiver or FakeReceiver(), session)
        node.up = Line("scheduler", self.scheduler.service.handle)
        node.env = Line("envpool-0", self.pool.service.handle)
        node.down = Line(name, node.shell.handle)
        node.push = Line(name, node.shell.handle)
        node.shell.connect("scheduler", node.up)
        node.shell.connect("envpool-0", node.env)
        self.scheduler.nodes[name] = node.down
        self.pool.nodes[name] = node.push
        self.nodes.append(node)
        await node.shell.start()
        await self.scheduler.until_joined(name)
        self.version = max(self.version, 1)
        await self.update(node, version=self.version)
        return node

    async def __aexit__(self, *exc: object) -> None:
        for node in self.nodes:
            await node.shell.stop()

    @property
    def node(self) -> Node:
        return self.nodes[0]

    async def begin_update(
        self, node: Node | None = None, *, version: int | None = None, inflight: str | None = None, **options: Any
    ) -> int:
        """Order an update to the next version (or `version`); returns its id."""
        node = node or self.node
        if version is None:
            self.version += 1
            version = self.version
        self.updates += 1
        transfer = Transfer(version, version, self.updates, self.updates, [node.name], "127.0.0.1:1", 30.0)
        order = BeginUpdate(
            self.updates,
            transfer,
            inflight or self.config.update.inflight,
            options.get("drain_seconds", 5.0),
            options.get("deadline_seconds", 60.0),
        )
        await self.scheduler.push(node.name, order)
        return self.updates

    async def update(self, node: Node | None = None, **options: Any) -> Loaded | LoadFailed:
        """Update and wait for the node's word."""
        await self.begin_update(node, **options)
        return await self.scheduler.load()

    async def lease(self, episode: int, node: Node | None = None, **options: Any) -> None:
        await self.scheduler.push((node or self.node).name, self.scheduler.lease(episode, **options))
