"""The shell of a rollout node: one engine, many episode loops, one conversation with the scheduler, one with each env pool.

consumes       orders (`ORDERS`), environment replies (`ENV_DELIVER`), a status call
produces       exchanges; what its loops, its updater and its env client produce
waits for      the end of a session (fenced, or its leases ended); then everything is discarded and it joins again
unblocked by   the scheduler, or `cluster.start_seconds` without one, which ends the node
on cancel      `stop`: loops end, the engine stops, nothing is sent any more

It imports no torch and no Ray: engine, receiver and renderer are handed in. Whatever task dies ends the node with its cause.
"""

from __future__ import annotations

import asyncio
import logging
from typing import TYPE_CHECKING

from rollout.chat import ChatRenderer
from rollout.departed import Departed
from rollout.envclient import PATIENCE_SECONDS, EnvClient
from rollout.figures import Figures
from rollout.gate import Gate
from rollout.ledger import Ledger
from rollout.loop import EpisodeLoop, Host
from rollout.outbox import Acknowledged, ExchangeLoop, OrderInbox, Outbox
from rollout.tasks import Tasks
from rollout.update import Updater
from segue.clock import now
from segue.config import Config
from segue.metrics import ActivityClock, Metrics, StateClock
from segue.ports.driver import NODE_STATUS, GetStatus, Status
from segue.ports.engine import Engine, EngineDead
from segue.ports.envpool import ENV_DELIVER, EnvDeliver
from segue.ports.rollout import (
    ORDERS,
    AbandonUpdate,
    BeginUpdate,
    Discarded,
    Drop,
    Extend,
    Fail,
    Lease,
    NodeEvent,
    NodeInfo,
    Order,
    Orders,
    OrdersSeen,
    ParkOrder,
    Stop,
)
from segue.ports.rpc import Done, Peer, Service

if TYPE_CHECKING:
    from segue.ports.weights import WeightReceiver

ABORT_SECONDS = 60.0
"""An engine that has not ended a request so long after it was told to is dead."""
ABORT_RETRY_SECONDS = (0.02, 0.1, 0.5, 2.0)
"""An abort that came before the engine knew the request is repeated after these waits; the last one repeats."""
ORDERED = "ordered"
"""Why a loop was dropped, where the scheduler ordered it and wants to hear `Discarded`."""

log = logging.getLogger(__name__)


class NodeShell:
    """See the module. `metrics` is the registry of role rollout, `sync_metrics` and `sync_clock` those of the receiver's target.

    `activity` has `segue.metrics.vocabulary.ROLLOUT_PRECEDENCE`. `session` is the first session number; a node process that
    takes the place of a dead one must be given a higher one.
    """

    def __init__(
        self,
        config: Config,
        name: str,
        engine: Engine,
        receiver: WeightReceiver,
        renderer: ChatRenderer,
        *,
        metrics: Metrics,
        sync_metrics: Metrics,
        activity: ActivityClock,
        sync_clock: StateClock,
        host: str = "127.0.0.1",
        session: int = 1,
    ) -> None:
        self.name = name
        self._config = config
        self._engine = engine
        self._receiver = receiver
        self._metrics = metrics
        self._received = metrics.counter("segue_messages_received_total")
        self._activity = activity
        self._info = NodeInfo(config.rollout.max_episodes, config.rollout.slots, host)
        self._session = session - 1
        self._tasks = Tasks(self._died)
        self._gate = Gate()
        self._ledger = Ledger()
        self._env = EnvClient(name, config.envpool, metrics, self._tasks.spawn, self._patience)
        self._updater = Updater(
            name,
            engine,
            receiver,
            self._gate,
            metrics=metrics,
            sync_metrics=sync_metrics,
            clock=sync_clock,
            activity=activity,
            keeps=config.update.inflight == "keep",
            probe_tolerance=config.weightsync.probe_tolerance if config.weightsync.probe_tokens else None,
            staged=config.weightsync.staging != "none",
            emit=self._emit,
            spawn=self._tasks.spawn,
        )
        self._host = Host(
            config=config.rollout,
            keeps=lambda: self._updater.keeps,
            engine=engine,
            renderer=renderer,
            env=self._env,
            gate=self._gate,
            ledger=self._ledger,
            departed=Departed(config.rollout.max_episodes, engine.forget),
            metrics=metrics,
            sampled=metrics.counter("segue_decode_tokens_total"),
            cached=metrics.counter("segue_cached_tokens_total"),
            turn_seconds=metrics.histogram("segue_turn_generate_seconds"),
            activity=activity,
            emit=self._emit,
            abort=self._abort_soon,
        )
        self._scheduler: Peer | None = None
        self._loops: dict[int, EpisodeLoop] = {}
        self._running: dict[EpisodeLoop, asyncio.Task[None]] = {}
        self._aborting: set[str] = set()
        self._outbox: Outbox | None = None
        self._inbox: OrderInbox | None = None
        self._exchange: ExchangeLoop | None = None
        self._figures = Figures(engine, self._ledger, metrics)
        self._ended: asyncio.Future[None] | None = None
        self._sessions: asyncio.Task[None] | None = None
        self._service = Service(self._service_error)
        self._service.add(ORDERS, self._orders)
        self._service.add(ENV_DELIVER, self._deliver)
        self._service.add(NODE_STATUS, self._status)
        activity.begin("wait_admission")

    # --- life -------------------------------------------------------------------------------------------------------

    def connect(self, name: str, peer: Peer) -> None:
        """Add a peer: the scheduler and every env pool, by the names of their roles; others are not needed here."""
        if name.startswith("scheduler"):
            self._scheduler = peer
        elif name.startswith("envpool"):
            self._env.connect(name, peer)

    async def handle(self, method: str, body: bytes) -> bytes:
        """The reply's bytes to a call of another role."""
        self._received.add()
        return await self._service.handle(method, body)

    async def start(self) -> None:
        """Start the engine and join. Raises what the engine raises (`UserError` for a model it cannot run)."""
        assert self._scheduler is not None, "connect the scheduler before start"
        self._ended = asyncio.get_running_loop().create_future()
        self._ended.add_done_callback(lambda future: future.cancelled() or future.exception())
        await self._engine.start()
        self._sessions = self._tasks.spawn("sessions", self._live(self._scheduler))

    @property
    def failed(self) -> asyncio.Future[None]:
        """Done when the node has ended: with the first cause as its exception, or without one after `stop`."""
        assert self._ended is not None, "start the node first"
        return self._ended

    async def run(self) -> None:
        """Return when the node was stopped; raise the first cause when it failed."""
        await asyncio.shield(self.failed)

    async def stop(self) -> None:
        """End all work at once. Nothing is sent any more; what was not acknowledged is the scheduler's to give out again."""
        self._silence("stopped")
        for loop in self._running:
            self._metrics.add("segue_discarded_tokens_total", loop.unsent, reason="stopped")
        await self._tasks.cancel()
        await self._engine.stop()
        self._receiver.close()
        if self._ended is not None and not self._ended.done():
            self._ended.set_result(None)

    def _died(self, name: str, error: BaseException) -> None:
        if self._ended is None or self._ended.done():
            return
        log.error("%s ended the node: %s: %s", name, type(error).__name__, error, exc_info=error)
        self._ended.set_exception(error)
        for loop in list(self._running):
            self._emit(Fail(*loop.key, "infra", "node_failed"), True)
        if self._exchange is not None:
            self._exchange.close()
        self._tasks.kill(spare=self._sessions)

    def _service_error(self, method: str, error: Exception) -> None:
        log.error("call %s failed", method, exc_info=error)

    # --- sessions ---------------------------------------------------------------------------------------------------

    async def _live(self, scheduler: Peer) -> None:
        while True:
            exchange = self._begin_session(scheduler)
            why = await exchange.run()
            if why == "closed":
                return
            lost = len(self._loops)
            log.warning("session %d of %s is over (%s): %d episodes discarded", self._session, self.name, why, lost)
            self._metrics.add("segue_leases_lost_total", lost)
            await self._discard_all("fenced")

    def _begin_session(self, scheduler: Peer) -> ExchangeLoop:
        self._session += 1
        self._outbox = Outbox(self.name, self._session, self._info, self._config.scheduler.lease_seconds, now())
        self._inbox = OrderInbox(self._session)
        self._env.begin(self._session)
        self._exchange = ExchangeLoop(
            self._outbox,
            scheduler,
            self._metrics,
            join_seconds=self._config.cluster.start_seconds,
            orders_seen=lambda: self._inbox.upto if self._inbox is not None else 0,
            counts=self.counts,
            settled=self._settled,
        )
        return self._exchange

    async def _discard_all(self, reason: str) -> None:
        """Stop every loop and wait until each has left engine and environment."""
        self._silence(reason)
        running = list(self._running.items())
        for loop, _ in running:
            loop.drop(reason)
        if running:
            await asyncio.wait([task for _, task in running])

    def _silence(self, reason: str) -> None:
        """Nothing of this session is sent any more; an update under way completes or not, and says nothing."""
        self._updater.stop()
        if self._outbox is not None:
            self._metrics.add("segue_discarded_tokens_total", self._outbox.sampled(), reason=reason)
        self._outbox = self._inbox = self._exchange = None

    # --- orders -----------------------------------------------------------------------------------------------------

    async def _orders(self, message: Orders) -> OrdersSeen:
        inbox = self._inbox
        if inbox is None or message.session != inbox.session:
            self._metrics.add("segue_messages_refused_total", len(message.orders), reason="stale_session")
            return OrdersSeen(self._session, inbox.upto if inbox is not None else 0)
        fresh = inbox.take(message)
        self._metrics.add("segue_messages_refused_total", len(message.orders) - len(fresh), reason="duplicate")
        for order in fresh:
            try:
                self._obey(order)
            except Exception as error:  # it counts as seen and would be lost
                self._died("orders", error)
                raise
        return OrdersSeen(inbox.session, inbox.upto)

    def _obey(self, order: Order) -> None:
        match order:
            case Lease():
                self._lease(order)
            case Drop():
                loop = self._find(order.episode, order.attempt)
                if loop is None:
                    self._emit(Discarded(order.episode, order.attempt), False)
                else:
                    self._drop(loop, ORDERED)
            case ParkOrder():
                loop = self._find(order.episode, order.attempt)
                if loop is not None:  # else it has just ended, and its last event is on the way
                    loop.park()
            case Extend():
                loop = self._find(order.episode, order.attempt)
                if loop is not None:
                    loop.extend(order.slice_tokens)
            case BeginUpdate():
                self._updater.begin(order)
            case AbandonUpdate():
                self._updater.abandon(order)
            case Stop():
                log.info("told to stop: %s", order.reason)
                for loop in list(self._running):
                    self._drop(loop, ORDERED)

    def _find(self, episode: int, attempt: int) -> EpisodeLoop | None:
        loop = self._loops.get(episode)
        return loop if loop is not None and loop.lease.attempt == attempt else None

    def _lease(self, lease: Lease) -> None:
        before = self._loops.get(lease.episode)
        if before is not None and before.lease.attempt >= lease.attempt:
            self._metrics.add("segue_messages_refused_total", reason="stale_attempt")
            return
        waits_for = None
        if before is not None:
            self._drop(before, "replaced")
            waits_for = self._running.get(before)
        loop = EpisodeLoop(lease, self._host)
        self._loops[lease.episode] = loop
        if not self._running:
            self._activity.end("wait_admission")
        self._running[loop] = self._tasks.spawn(f"episode-{lease.episode}.{lease.attempt}", self._episode(loop, waits_for))

    async def _episode(self, loop: EpisodeLoop, before: asyncio.Task[None] | None) -> None:
        try:
            if before is not None:
                await asyncio.wait([before])
            await loop.run()
        finally:
            del self._running[loop]
            if not self._running:
                self._activity.begin("wait_admission")
                self.counts()  # nothing is under way: what is exported now adds up
            if self._loops.get(loop.lease.episode) is loop:
                del self._loops[loop.lease.episode]
        if loop.dropped == ORDERED:
            self._emit(Discarded(*loop.key), False)

    def _drop(self, loop: EpisodeLoop, reason: str) -> None:
        if not loop.dropped:
            lost = self._outbox.discard(loop.key) if self._outbox is not None else 0
            self._metrics.add("segue_discarded_tokens_total", lost, reason="dropped")
            loop.drop(reason)

    # --- what loops need --------------------------------------------------------------------------------------------

    def _patience(self) -> float:
        """An environment's answer that comes now would only wait for a slot if other requests do."""
        return PATIENCE_SECONDS if self._engine.counts().waiting else 0.0

    def _emit(self, event: NodeEvent, urgent: bool) -> None:
        outbox, exchange = self._outbox, self._exchange
        if outbox is None or exchange is None:
            return  # between two sessions: nobody is to hear it
        before = outbox.due()
        outbox.put(event, now(), urgent)
        if outbox.due() < before:
            exchange.wake()

    def _settled(self, settled: Acknowledged) -> None:
        """A reply came: pools may forget, refused attempts end."""
        for episode, attempt, turn in settled.records:
            self._env.accepted(episode, attempt, turn)
        for episode, attempt in settled.refused:
            loop = self._find(episode, attempt)
            if loop is not None:
                self._drop(loop, "refused")
        for episode, attempt in settled.unfillable:
            log.error("the scheduler lacks deltas of episode %d that attempt %d never had", episode, attempt)
            loop = self._find(episode, attempt)
            if loop is not None:
                self._drop(loop, "gap")
            self._emit(Fail(episode, attempt, "infra", "gap"), True)

    def _abort_soon(self, loop: EpisodeLoop, request: str) -> None:
        if request not in self._aborting:
            self._aborting.add(request)
            self._tasks.spawn(f"abort-{request}", self._abort(loop, request))

    async def _abort(self, loop: EpisodeLoop, request: str) -> None:
        """End a request. Never while the engine is paused; again if the engine did not know it yet."""
        try:
            tries, deadline = 0, now() + ABORT_SECONDS
            while loop.request == request:
                if now() >= deadline:
                    raise EngineDead(f"the engine did not end request {request} within {ABORT_SECONDS:g} s")
                wait = deadline - now()
                if not self._updater.paused and not await self._engine.abort(request):
                    wait = ABORT_RETRY_SECONDS[min(tries, len(ABORT_RETRY_SECONDS) - 1)]
                    tries += 1
                if loop.request == request:
                    await asyncio.wait([self._gate.changed()], timeout=wait)
        finally:
            self._aborting.discard(request)

    # --- figures ----------------------------------------------------------------------------------------------------

    async def _deliver(self, message: EnvDeliver) -> Done:
        return await self._env.deliver(message)

    def counts(self) -> dict[str, float]:
        """The engine's and the ledger's totals, also set as gauges and counters."""
        depth = self._outbox.depth if self._outbox is not None else 0
        return self._figures.refresh(len(self._running), depth)

    async def _status(self, request: GetStatus) -> Status:
        return Status(
            {
                "name": self.name,
                "session": self._session,
                "version": self._engine.version,
                "counts": self.counts(),
                "prefill_seconds": dict(self._ledger.seconds),
                "states": self._activity.seconds(),
            }
        )
