"""A whole pool for tests: its shell, nodes that talk to it, and events to wait for instead of sleeping."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from envpool.shell import PoolShell
from envpool.workers import ProcessWorkers, Workers
from segue.cluster.peers import LocalPeer
from segue.config import Config
from segue.episode import Task
from segue.metrics import Metrics
from segue.ports.envpool import (
    ENV_DELIVER,
    ENV_SUBMIT,
    RESET_STEP,
    Accepted,
    Close,
    Create,
    Created,
    EnvDeliver,
    EnvFailed,
    EnvReply,
    EnvRequest,
    EnvSubmit,
    Restore,
    Step,
    Stepped,
)
from segue.ports.rpc import Done, Service, ask

FAULTY = "faulty_suite:build"
PATIENCE = 60.0
"""How long a test waits for an event before it calls it missing; nothing is ever measured against it."""


def make_config(env: str, args: dict[str, Any] | None = None, start_seconds: float = 180.0, **envpool: Any) -> Config:
    """A config with this environment and pool."""
    cluster = {"start_seconds": start_seconds}
    return Config.model_validate({"steps": 1, "task": {"env": env, "args": args or {}}, "envpool": envpool, "cluster": cluster})


def a_task(number: int = 0, env: str = "faulty") -> Task:
    """Some task."""
    return Task(f"task {number}", env, number)


class Node:
    """A rollout node's side: sends requests, collects replies by (episode, attempt, step)."""

    def __init__(self, shell: PoolShell, name: str = "rollout-0", session: int = 1, patience: float = PATIENCE) -> None:
        self.name = name
        self.patience = patience
        self.session = session
        self.replies: list[EnvReply] = []
        self.deliveries = 0
        self.service = Service()
        self.service.add(ENV_DELIVER, self._deliver)
        self._waiting: dict[tuple[int, int, int], asyncio.Future[EnvReply]] = {}
        self.pool = LocalPeer(shell.name, shell)
        self.peer = LocalPeer(name, self.service)
        shell.connect(name, self.peer)

    async def submit(self, *requests: EnvRequest) -> None:
        """Hand requests over."""
        await ask(self.pool, ENV_SUBMIT, EnvSubmit(self.name, self.session, list(requests)), PATIENCE)

    async def call(self, request: Create | Step) -> EnvReply:
        """Hand one over and wait for its reply."""
        step = request.step if isinstance(request, Step) else RESET_STEP
        future = self._waiting[request.episode, request.attempt, step] = asyncio.get_running_loop().create_future()
        await self.submit(request)
        return await asyncio.wait_for(future, self.patience)

    async def create(
        self, episode: int, attempt: int = 1, task: Task | None = None, member: int = 0, restore: Restore | None = None
    ) -> Created:
        """Create, expecting success."""
        reply = await self.call(Create(episode, attempt, task or a_task(episode), member, restore))
        assert isinstance(reply, Created), reply
        return reply

    async def step(self, episode: int, step: int, action: str, attempt: int = 1) -> Stepped:
        """Step, expecting success."""
        reply = await self.call(Step(episode, attempt, step, action))
        assert isinstance(reply, Stepped), reply
        return reply

    async def fails(self, request: Create | Step) -> EnvFailed:
        """Call, expecting a failure."""
        reply = await self.call(request)
        assert isinstance(reply, EnvFailed), reply
        return reply

    async def accepted(self, episode: int, step: int, attempt: int = 1) -> None:
        """The record of a turn is safe."""
        await self.submit(Accepted(episode, attempt, step))

    async def close(self, episode: int, attempt: int = 1) -> None:
        """Done with an instance."""
        await self.submit(Close(episode, attempt))

    async def _deliver(self, message: EnvDeliver) -> Done:
        self.deliveries += 1
        assert message.session == self.session, "a delivery for another session"
        for reply in message.replies:
            self.replies.append(reply)
            step = RESET_STEP if isinstance(reply, Created) else reply.step
            future = self._waiting.pop((reply.episode, reply.attempt, step), None)
            if future is not None and not future.done():
                future.set_result(reply)
        return Done()


class WatchedShell(PoolShell):
    """Tells when a worker is gone, and when all slots are in a wanted state."""

    def __init__(self, config: Config, workers: Workers | None = None) -> None:
        self.metrics = Metrics("envpool", envs=[config.task.env])
        super().__init__(config, "envpool-0", self.metrics, workers)
        self.ends = 0
        self.gone_from: set[tuple[int, int]] = set()
        self.details: list[str] = []
        self._changed = asyncio.Event()

    @property
    def processes(self) -> ProcessWorkers:
        """The real workers."""
        assert isinstance(self._workers, ProcessWorkers)
        return self._workers

    @property
    def status(self) -> dict[str, Any]:
        """The core's status."""
        assert self._core is not None
        return self._core.status()

    def lost(self, seat: int, generation: int, detail: str) -> None:
        self.details.append(detail)
        super().lost(seat, generation, detail)

    def gone(self, seat: int, generation: int) -> None:
        super().gone(seat, generation)
        self.ends += 1
        self.gone_from.add((seat, generation))
        self._changed.set()

    def _do(self, commands: Any) -> None:
        super()._do(commands)
        if self._core is not None:
            slots = self.status["slots"]
            total = self._config.envpool.workers * self._config.envpool.instances
            assert sum(slots.values()) == total, slots
        self._changed.set()

    async def until(self, what: Any) -> None:
        """Until `what(self)` holds; looked at after every event of the pool."""
        async with asyncio.timeout(PATIENCE):
            while not what(self):
                self._changed.clear()
                await self._changed.wait()

    async def until_free(self) -> None:
        """Until every slot is free again."""
        await self.until(lambda shell: shell.status["slots"]["free"] == sum(shell.status["slots"].values()))


@asynccontextmanager
async def running(config: Config, workers: Workers | None = None) -> AsyncIterator[WatchedShell]:
    """A started pool, stopped afterwards."""
    shell = WatchedShell(config, workers)
    await shell.start()
    try:
        yield shell
    finally:
        await shell.stop()
