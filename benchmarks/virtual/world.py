"""A virtual world: the production shells of scheduler, nodes and env pools in one process on one loop with a logical clock, wired
with in-process peers as serial mode is, and the modelled parts at their ports. `play` plays a scenario to its end.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import tempfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from benchmarks.virtual.engine import ModelledEngine
from benchmarks.virtual.learner import ModelledLearner, Work
from benchmarks.virtual.scenario import ENV, World
from benchmarks.virtual.tokenizer import ByteTokenizer
from benchmarks.virtual.weights import Hub, ModelledReceiver
from benchmarks.virtual.workers import ModelledWorkers
from benchmarks.virtual.workload import Workload
from envpool.shell import PoolShell
from envpool.workers import Workers
from rollout.chat import ChatRenderer
from rollout.node import NodeShell
from scheduler.shell import SchedulerShell
from segue.clock import LogicalCompute, LogicalLoop, now
from segue.cluster.peers import LocalPeer
from segue.cluster.roles import Role
from segue.config import Config
from segue.metrics import ActivityClock, Metrics, StateClock
from segue.metrics.samples import Scrape
from segue.metrics.states import Clock
from segue.metrics.vocabulary import ROLLOUT_PRECEDENCE, STATES
from segue.ports.driver import GET_STATUS, OPEN_TRAINING, STOP_RUN, WATCH_EVENTS, GetStatus, OpenTraining, StopRun, WatchEvents
from segue.ports.journal import MemoryJournal
from segue.ports.rpc import Peer, ask

CALL_SECONDS = 60.0
SETTLE_SECONDS = 60.0
"""How long nodes may take to hear that the run is over, in virtual time."""

COLLECT_AFTER = 100_000
"""Objects made and not freed, until Python looks for cycles among them."""

SPEAKS_WITH = {
    "scheduler": ("rollout", "learner"),
    "envpool": ("rollout",),
    "rollout": ("scheduler", "envpool"),
    "learner": ("scheduler",),
}
"""Whom a role has to know."""

Wrap = Callable[[Workers], Workers]


class Ran(msgspec.Struct, frozen=True):
    """A scenario that was played.

    lines     one per step, as metrics.jsonl has them (lengths in units)
    works     what each batch held
    scrapes   by how many steps were trained: every target's samples, as `/metrics` would give them
    status    of the scheduler after the last step, and `stopped` once every node has let go
    nodes     each node's counts then
    warnings  what the scheduler told the driver
    seconds   virtual
    """

    lines: list[dict[str, Any]]
    works: list[Work]
    scrapes: dict[int, Scrape]
    status: dict[str, Any]
    stopped: dict[str, Any]
    nodes: dict[str, dict[str, float]]
    warnings: list[str]
    seconds: float


def play(
    world: World, marks: Collection[int] = (), *, sink: bool = False, wrap: Wrap | None = None, until: int | None = None
) -> Ran:
    """Run a scenario in a loop of its own. `marks`: after how many trained steps to scrape; others: see `VirtualCluster`."""
    with (
        _rare_collections(),
        tempfile.TemporaryDirectory(prefix="segue-virtual-") as folder,
        asyncio.Runner(loop_factory=LogicalLoop) as runner,
    ):
        cluster = VirtualCluster(world, Path(folder), set(marks), sink=sink, wrap=wrap, until=until)
        runner.run(cluster.play())
    return cluster.ran


@contextmanager
def _rare_collections() -> Iterator[None]:
    """Let Python look for cycles less often: a cluster is millions of objects that live long, and makes few cycles. By default it
    looked for them a quarter of the time."""
    before = gc.get_threshold()
    gc.set_threshold(COLLECT_AFTER, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


class VirtualCluster:
    """One world. With `sink` the learner takes no time and publishes nothing after the first weights: what generation alone could
    do. `wrap` goes around the environment workers of every pool (a baseline's barrier, say). It ends after `until` steps, where
    that is given. The parts are public for tests."""

    def __init__(
        self,
        world: World,
        run_dir: Path,
        marks: set[int],
        *,
        sink: bool = False,
        wrap: Wrap | None = None,
        until: int | None = None,
    ) -> None:
        self.world = world
        self.roles: dict[str, Role] = {}
        self.engines: dict[str, ModelledEngine] = {}
        self._run_dir = run_dir
        self._marks = marks
        self._sink = sink
        self._until = until
        self._reached = asyncio.Event()
        self._wrap: Wrap = wrap or (lambda workers: workers)
        self._metrics: dict[str, Metrics] = {}
        self._clocks: dict[str, Clock] = {}
        self._scrapes: dict[int, Scrape] = {}
        self._warnings: list[str] = []
        self.learner: ModelledLearner
        self.ran: Ran

    async def play(self) -> None:
        """`run`, and keep what came of it: a task's result may be printed by asyncio, which would take longer than the run."""
        self.ran = await self.run()

    async def run(self) -> Ran:
        """From the start of the roles to the last step (or the one to stop at) and the end of what was under way."""
        self._build()
        try:
            await self._start()
            return await self._course()
        finally:
            gc.unfreeze()
            for name in sorted(self.roles, key=lambda name: name.startswith(("scheduler", "envpool"))):
                await self.roles[name].stop()

    # --- wiring -----------------------------------------------------------------------------------------------------------------

    def _build(self) -> None:
        config, scenario = self.world.config, self.world.scenario
        workload = Workload(self.world)
        hub = Hub(scenario.weights, config.weightsync.probe_tokens)
        renderer = ChatRenderer(ByteTokenizer())
        self.roles["scheduler-0"] = self._scheduler(workload)
        for rank in range(config.envpool.pools):
            name = f"envpool-{rank}"
            metrics = self._registry(name, "envpool")
            self.roles[name] = PoolShell(config, name, metrics, self._wrap(ModelledWorkers(scenario.env, workload)))
        for rank in range(config.rollout.nodes):
            self.roles[f"rollout-{rank}"] = self._node(f"rollout-{rank}", workload, hub, renderer)
        model = scenario.learner
        if self._sink:
            model = msgspec.structs.replace(
                model, step_seconds=0.0, seconds_per_token=0.0, gather_seconds=0.0, checkpoint_seconds=0.0
            )
        clock = self._clock("learner-0", "learner")
        self.learner = self.roles["learner-0"] = ModelledLearner(
            config, model, scenario.unit, hub, self._metrics["learner-0"], clock, self._at_step, updates=not self._sink
        )
        peers: dict[str, list[LocalPeer]] = {}
        for name, role in self.roles.items():
            peers.setdefault(name.partition("-")[0], []).append(LocalPeer(name, role))
        for name, role in self.roles.items():
            for kind in SPEAKS_WITH[name.partition("-")[0]]:
                for peer in peers[kind]:
                    role.connect(peer.name, peer)

    def _scheduler(self, workload: Workload) -> SchedulerShell:
        config = self.world.config
        clock = self._clock("scheduler-0", "scheduler")
        tasks = workload.tasks((config.steps + config.staleness.max_age + 2) * config.batch.groups)
        compute = LogicalCompute()
        return SchedulerShell(config, self._run_dir, tasks, self._metrics["scheduler-0"], clock, MemoryJournal(keep=10), compute)

    def _node(self, name: str, workload: Workload, hub: Hub, renderer: ChatRenderer) -> NodeShell:
        config, scenario = self.world.config, self.world.scenario
        time = asyncio.get_running_loop().time
        engine = self.engines[name] = ModelledEngine(scenario.engine, workload, config.rollout.slots, scenario.unit)
        activity = self._clocks[name] = ActivityClock(ROLLOUT_PRECEDENCE, time)
        sync_clock = self._clock(f"weightsync-{name}", "weightsync")
        return NodeShell(
            config,
            name,
            engine,
            ModelledReceiver(hub, name),  # type: ignore[arg-type]  # its manifest has no tensors
            renderer,
            metrics=self._registry(name, "rollout"),
            sync_metrics=self._metrics[f"weightsync-{name}"],
            activity=activity,
            sync_clock=sync_clock,
        )

    def _registry(self, target: str, role: str) -> Metrics:
        config: Config = self.world.config
        metrics = self._metrics[target] = Metrics(
            role, target, envs=(ENV,), staleness_bound=config.staleness.max_age, monotonic=asyncio.get_running_loop().time
        )
        return metrics

    def _clock(self, target: str, role: str) -> StateClock:
        self._registry(target, role)
        clock = self._clocks[target] = StateClock(STATES[role], asyncio.get_running_loop().time)
        return clock

    # --- the course -------------------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        for target, clock in self._clocks.items():
            self._metrics[target].attach(clock)
        for role in self.roles.values():
            await role.start()

    async def _course(self) -> Ran:
        scheduler = LocalPeer("scheduler-0", self.roles["scheduler-0"])
        runs = {name: asyncio.create_task(role.run(), name=name) for name, role in self.roles.items()}
        follow = asyncio.create_task(self._follow(scheduler))
        reached = asyncio.create_task(self._reached.wait())
        try:
            await ask(scheduler, OPEN_TRAINING, OpenTraining(self.world.config.steps), CALL_SECONDS)
            gc.freeze()  # what has been built stays: nobody need look for cycles in it
            waiting: set[asyncio.Task[Any]] = {follow, reached, *runs.values()}
            while not (runs["learner-0"].done() or reached.done()):
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            seconds = now()
            status = (await ask(scheduler, GET_STATUS, GetStatus(), CALL_SECONDS)).data
            await ask(scheduler, STOP_RUN, StopRun("all steps that were asked for are trained"), CALL_SECONDS)
            await self._settle()
            stopped = (await ask(scheduler, GET_STATUS, GetStatus(), CALL_SECONDS)).data
        finally:
            for task in (follow, reached, *runs.values()):
                task.cancel()
        nodes = {name: role.counts() for name, role in self.roles.items() if isinstance(role, NodeShell)}
        learner = self.learner
        return Ran(learner.lines, learner.works, self._scrapes, status, stopped, nodes, self._warnings, seconds)

    async def _settle(self) -> None:
        """Until no node has an episode any more."""
        nodes = [role for role in self.roles.values() if isinstance(role, NodeShell)]
        deadline = now() + SETTLE_SECONDS
        while any(node.counts()["episodes"] for node in nodes):
            assert now() < deadline, "a node goes on with episodes of a run that is over"
            await asyncio.sleep(1.0)

    async def _follow(self, scheduler: Peer) -> None:
        """Take the scheduler's events, as the driver does, so that they do not gather; keep the warnings."""
        seen = 0
        while True:
            reply = await ask(scheduler, WATCH_EVENTS, WatchEvents(seen, 60.0), 2 * CALL_SECONDS)
            for event in reply.events:
                seen = event.number
                if event.what in ("warning", "fatal"):
                    self._warnings.append(event.data["sentence"])

    def _at_step(self, done: int) -> None:
        if done in self._marks:
            self._scrapes[done] = self.scrape()
        if done == self._until:
            self._reached.set()

    def scrape(self) -> Scrape:
        """What every target would export now."""
        return {target: metrics.snapshot() for target, metrics in self._metrics.items()}


def quiet() -> None:
    """Only what is wrong is logged: fences and failures are part of many scenarios."""
    logging.getLogger().setLevel(logging.ERROR)
