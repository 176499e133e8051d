"""The env pool as a role: gives the pure core (`envpool.pool`) its workers, its clock and its peers.

consumes       `EnvSubmit` and `PoolStatusRequest` calls; messages, deaths and ends of workers; one timer
produces       acknowledgements at once; `EnvDeliver` batches to the node that asked; worker processes
waits for      at start, the first worker, or the fault that keeps all from starting; then nothing: every wait is the core's,
               with a deadline of the core's, and one timer is armed for the earliest
unblocked by   workers, the timer, `stop`
on cancel      `stop` ends every worker and drops what was not delivered
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from envpool.commands import Command, Deliver, Kill, Send, Spawn
from envpool.messages import LoadedSuite, LoadFailed, Raised, Reply
from envpool.outbox import Outbox
from envpool.pool import Pool
from envpool.raised import RaisedLog
from envpool.record import PoolLimits
from envpool.seats import START_FAILURES
from envpool.workers import ProcessWorkers, Workers
from segue.clock import now
from segue.config import Config
from segue.errors import RunFailed, UserError
from segue.metrics import Metrics, SlotClock
from segue.metrics.vocabulary import STATES
from segue.ports.envpool import ENV_SUBMIT, POOL_STATUS, EnvSubmit, PoolStatus, PoolStatusRequest
from segue.ports.rpc import Done, Peer, Service

log = logging.getLogger(__name__)


def limits_of(config: Config) -> PoolLimits:
    """A pool's size and deadlines. An instance may idle as long as a turn can take its node, an update in the middle included."""
    pool = config.envpool
    return PoolLimits(
        workers=pool.workers,
        instances=pool.instances,
        start_seconds=config.cluster.start_seconds / START_FAILURES,  # so that a pool that cannot start says so in time
        create_seconds=pool.create_seconds,
        reset_seconds=pool.reset_seconds,
        step_seconds=pool.step_seconds,
        close_seconds=pool.close_seconds,
        idle_seconds=config.rollout.wall_seconds
        + config.update.drain_seconds
        + config.update.deadline_seconds
        + config.scheduler.lease_seconds,
        respawns_per_minute=pool.respawns_per_minute,
    )


class PoolShell:
    """See the module. Without `workers` it starts processes; `InProcessWorkers.of(config)` keeps everything on the loop."""

    def __init__(self, config: Config, name: str, metrics: Metrics, workers: Workers | None = None) -> None:
        self.name = name
        self._config = config
        self._metrics = metrics
        self._received = metrics.counter("segue_messages_received_total")
        self._workers = workers or ProcessWorkers(config.task.env, config.task.args, config.envpool.snapshot_bytes)
        self._service = Service(self._call_failed)
        self._service.add(ENV_SUBMIT, self._submit)
        self._service.add(POOL_STATUS, self._status)
        self._peers: dict[str, Peer] = {}
        self._outboxes: dict[str, Outbox] = {}
        self._patience: dict[str, float] = {}
        self._raised = RaisedLog(name)
        self._core: Pool | None = None
        self._timer: asyncio.Handle | None = None  # no TimerHandle from uvloop, where the time has come already
        self._timer_due = 0.0
        self._ready: asyncio.Future[None] | None = None
        self._end: asyncio.Future[None] | None = None

    # --- life -------------------------------------------------------------------------------------------------------

    def connect(self, name: str, peer: Peer) -> None:
        """Where to deliver the replies for node `name`."""
        self._peers[name] = peer
        if name in self._outboxes:
            self._outboxes[name].peer = peer

    async def start(self) -> None:
        """Start the workers; returns when the first one takes calls. Raises UserError or RunFailed if none can."""
        loop = asyncio.get_running_loop()
        limits = limits_of(self._config)
        log.info("%s: %d workers × %d instances; deadlines in seconds: %s", self.name, limits.workers, limits.instances, limits)
        self._ready, self._end = loop.create_future(), loop.create_future()
        clock = SlotClock(STATES["envpool"], limits.workers * limits.instances, loop.time, "respawn")
        self._metrics.attach(clock)
        self._core = Pool(limits, self._config.task.env, self._metrics, clock)
        self._workers.open(self)
        self._event(lambda core: core.begin(now()))
        await asyncio.wait([self._ready, self._end], return_when=asyncio.FIRST_COMPLETED)
        if self._end.done():
            await self.stop()
            self._end.result()

    async def run(self) -> None:
        """Returns once stopped. Raises RunFailed or UserError when the pool cannot work any more."""
        assert self._end is not None, "started first"
        await asyncio.shield(self._end)

    async def stop(self) -> None:
        """End all workers; what was not delivered is dropped."""
        if self._timer is not None:
            self._timer.cancel()
        for outbox in self._outboxes.values():
            outbox.close()
        self._core = None
        await self._workers.close()
        if self._end is not None and not self._end.done():
            self._end.set_result(None)

    async def handle(self, method: str, body: bytes) -> bytes:
        """See `segue.ports.rpc.Service`."""
        self._received.add()
        return await self._service.handle(method, body)

    # --- calls of nodes ---------------------------------------------------------------------------------------------

    async def _submit(self, submit: EnvSubmit) -> Done:
        if submit.node not in self._peers:
            raise RuntimeError(f"{self.name} has no way to answer {submit.node}: it was not connected")
        if not self._event(lambda core: core.submit(now(), submit.node, submit.session, submit.requests)):
            raise RuntimeError(f"{self.name} is not running")
        self._patience[submit.node] = submit.patience
        if submit.node in self._outboxes:
            self._outboxes[submit.node].patience = submit.patience
        return Done()

    async def _status(self, request: PoolStatusRequest) -> PoolStatus:
        return PoolStatus(self._core.status() if self._core is not None else {})

    def _call_failed(self, method: str, error: Exception) -> None:
        log.error("%s failed: %s: %s", method, type(error).__name__, error)

    # --- workers (envpool.workers.Sink) -------------------------------------------------------------------------------

    def said(self, seat: int, generation: int, body: LoadedSuite | LoadFailed | Reply) -> None:
        if isinstance(body, Raised):
            self._raised.add(body)
        self._event(lambda core: core.worker_said(now(), seat, generation, body))
        if isinstance(body, LoadedSuite) and self._ready is not None and not self._ready.done():
            self._ready.set_result(None)

    def lost(self, seat: int, generation: int, detail: str) -> None:
        log.warning("%s: env worker %d.%d %s", self.name, seat, generation, detail)
        self._event(lambda core: core.worker_lost(now(), seat, generation, detail))

    def gone(self, seat: int, generation: int) -> None:
        self._event(lambda core: core.worker_gone(now(), seat, generation))

    # --- doing ------------------------------------------------------------------------------------------------------

    def _event(self, decide: Callable[[Pool], list[Command]]) -> bool:
        """Let the core decide and carry it out. False if the pool is not running. A mistake of ours ends the pool, loudly."""
        if self._core is None:
            return False
        try:
            self._do(decide(self._core))
        except Exception as error:
            log.exception("%s: an event failed", self.name)
            self._fail(RunFailed(self.name, f"{self.name} failed: {type(error).__name__}: {error} (its log has the traceback)."))
        return True

    def _do(self, commands: list[Command]) -> None:
        """Carry out what the core decided, then arm the timer for its next deadline."""
        for command in commands:
            if isinstance(command, Deliver):
                self._deliver(command)
            elif isinstance(command, Send):
                self._workers.send(command.seat, command.generation, command.call)
            elif isinstance(command, Spawn):
                self._workers.spawn(command.seat, command.generation)
            else:
                assert isinstance(command, Kill)
                self._workers.kill(command.seat, command.generation)
        self._arm()
        fault = self._core.fault if self._core is not None else None
        if fault is not None:
            self._fail(UserError(fault.sentence) if fault.user else RunFailed(self.name, fault.sentence))

    def _arm(self) -> None:
        due = self._core.next_deadline() if self._core is not None else None
        if due is None or (self._timer is not None and self._timer_due <= due):
            return  # a timer that fires too early looks again
        if self._timer is not None:
            self._timer.cancel()
        self._timer_due = due
        self._timer = asyncio.get_running_loop().call_at(due, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._event(lambda core: core.tick(now()))

    def _deliver(self, command: Deliver) -> None:
        outbox = self._outboxes.get(command.node)
        if outbox is not None and outbox.session > command.session:
            self._metrics.add("segue_messages_refused_total", reason="stale_session")
            return
        if outbox is None or outbox.session < command.session:
            if outbox is not None:
                outbox.close()
            outbox = self._outboxes[command.node] = Outbox(
                self.name,
                self._peers[command.node],
                command.session,
                self._metrics,
                self._config.cluster.silence_seconds,
                silent=lambda: self._node_lost(command.node),
                failed=self._fail,
            )
            outbox.patience = self._patience.get(command.node, 0.0)
        outbox.put(command.reply)

    def _node_lost(self, node: str) -> None:
        self._event(lambda core: core.node_lost(now(), node))

    def _fail(self, error: BaseException) -> None:
        """The pool cannot go on: `run` (or `start`) raises."""
        if self._end is not None and not self._end.done():
            self._end.set_exception(error)
            self._end.exception()  # also where nobody awaits it: it was logged
            log.error("%s: %s", self.name, error)
