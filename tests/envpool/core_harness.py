"""The pool's core on a table: time is a number, workers are functions, and every command can be looked at."""

from __future__ import annotations

from typing import Any

from faulty_suite import FaultyArgs, FaultySuite

from envpool.commands import Command, Deliver, Kill, Send, Spawn
from envpool.environment import Suite
from envpool.instance import Instance
from envpool.messages import Call, LoadedSuite, Make, Reply
from envpool.pool import Pool
from envpool.record import PoolLimits
from segue.episode import Task
from segue.metrics import Metrics, SlotClock
from segue.metrics.vocabulary import STATES
from segue.ports.envpool import Accepted, Close, Create, EnvReply, EnvRequest, Restore, Step

ENV = "faulty"
DEFAULTS: dict[str, Any] = {
    "workers": 1,
    "instances": 2,
    "start_seconds": 60.0,
    "create_seconds": 30.0,
    "reset_seconds": 20.0,
    "step_seconds": 10.0,
    "close_seconds": 5.0,
    "idle_seconds": 300.0,
    "respawns_per_minute": 60,
}


class Table:
    """One pool core with workers that answer when told to (`work`)."""

    def __init__(self, suite: Suite | None = None, start: bool = True, snapshot_bytes: int = 1 << 18, **limits: Any) -> None:
        self.now = 0.0
        self.limits = PoolLimits(**(DEFAULTS | limits))
        self.metrics = Metrics("envpool", envs=[ENV])
        slots = self.limits.workers * self.limits.instances
        self.clock = SlotClock(STATES["envpool"], slots, lambda: self.now, "respawn")
        self.pool = Pool(self.limits, ENV, self.metrics, self.clock)
        self.suite = suite or FaultySuite(FaultyArgs())
        self.snapshot_bytes = snapshot_bytes
        self.replies: list[tuple[str, int, EnvReply]] = []
        self.calls: list[tuple[int, int, Call]] = []
        self.spawned: list[Spawn] = []
        self.killed: list[Kill] = []
        self.instances: dict[int, Instance] = {}
        self.do(self.pool.begin(self.now))
        if start:
            self.ready()

    def do(self, commands: list[Command]) -> None:
        """Take note of what the core decided, and check what must always hold."""
        for command in commands:
            if isinstance(command, Deliver):
                self.replies.append((command.node, command.session, command.reply))
            elif isinstance(command, Send):
                busy = {call.instance for _, _, call in self.calls}
                assert command.call.instance not in busy, "two calls of one instance at once"
                self.calls.append((command.seat, command.generation, command.call))
            elif isinstance(command, Spawn):
                self.spawned.append(command)
            else:
                assert isinstance(command, Kill)
                self.killed.append(command)
                self.calls = [c for c in self.calls if c[:2] != (command.seat, command.generation)]
        counts = self.pool.status()["slots"]
        assert sum(counts.values()) == self.limits.workers * self.limits.instances, counts
        live = sum(n for phase, n in self.pool.status()["instances"].items() if phase != "queued")
        assert counts["leased"] <= live
        if self.calls or self.killed:
            assert self.pool.next_deadline() is not None, "something runs without a deadline"

    # --- the node's side --------------------------------------------------------------------------------------------

    def submit(self, *requests: EnvRequest, node: str = "n0", session: int = 1) -> None:
        self.do(self.pool.submit(self.now, node, session, requests))

    def create(self, episode: int, attempt: int = 1, restore: Restore | None = None, task: Task | None = None) -> None:
        self.submit(Create(episode, attempt, task or Task(f"task {episode}", ENV, episode), 0, restore))

    def step(self, episode: int, step: int, action: str = "x", attempt: int = 1) -> None:
        self.submit(Step(episode, attempt, step, action))

    def accepted(self, episode: int, step: int, attempt: int = 1) -> None:
        self.submit(Accepted(episode, attempt, step))

    def close(self, episode: int, attempt: int = 1) -> None:
        self.submit(Close(episode, attempt))

    def taken(self) -> list[Any]:
        """Replies since the last time."""
        replies = [reply for _, _, reply in self.replies]
        self.replies.clear()
        return replies

    def reply(self) -> Any:
        """The one reply there is."""
        (reply,) = self.taken()
        return reply

    # --- the workers' side ------------------------------------------------------------------------------------------

    def ready(self) -> None:
        """All spawned workers are ready."""
        spawned, self.spawned = self.spawned, []
        for spawn in spawned:
            self.do(self.pool.worker_said(self.now, spawn.seat, spawn.generation, LoadedSuite(1)))

    def work(self, limit: int = 1000) -> None:
        """Workers do all they were asked to do, follow-ups included."""
        while self.calls and limit:
            limit -= 1
            self.say(*self.calls.pop(0))

    def say(self, seat: int, generation: int, call: Call) -> None:
        """Do one call and report it."""
        self.do(self.pool.worker_said(self.now, seat, generation, self.perform(call)))

    def perform(self, call: Call) -> Reply:
        """What a worker would answer."""
        if isinstance(call, Make):
            self.instances[call.instance] = Instance(self.suite, call, self.snapshot_bytes)
        return self.instances[call.instance].perform(call)

    def lose(self, seat: int = 0, detail: str = "exited with code 1") -> None:
        """A worker dies of itself."""
        self.calls = [c for c in self.calls if c[0] != seat]
        self.do(self.pool.worker_lost(self.now, seat, self.generation(seat), detail))

    def gone(self) -> None:
        """All killed workers are gone; their replacements start and are ready."""
        killed, self.killed = self.killed, []
        for kill in killed:
            self.do(self.pool.worker_gone(self.now, kill.seat, kill.generation))

    def generation(self, seat: int) -> int:
        return self.pool._instances.seats.generation(seat)

    def at(self, now: float, recover: bool = False) -> None:
        """Let time pass, deadline by deadline; with `recover`, what was killed is gone at once and replaced."""
        while (due := self.pool.next_deadline()) is not None and due <= now:
            self.now = max(self.now, due)
            self.do(self.pool.tick(self.now))
            if recover:
                self.gone()
                self.ready()
        self.now = now
