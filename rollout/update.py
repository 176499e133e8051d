"""How a node gets new weights (docs/protocol.md, "An update").

consumes       begin and abandon orders; the receiver's staged weights
produces       `Loaded` or `LoadFailed`; the gate's level; the engine's pause, load and resume, of which it is the only owner
waits for      the transfer; running requests (`turn`) or episodes (`episode`) up to `drain_seconds`; the engine to become idle
unblocked by   the receiver, the gate's counts, the engine; deadlines of the order
on cancel      staged weights are discarded; once the engine is paused, an update is not cancelled any more

Weights are staged while the engine generates; where there is no memory for a second copy (`weightsync.staging` = "none"), they
arrive while it is paused, straight into the model, and the pause contains the transfer. One update at a time: a newer order takes
the place of one that has not paused the engine yet, and follows one that has. Whatever fails before the weights change leaves
the old ones serving; what fails after that (without staging: after the first bucket is in) is fatal and ends the node, because a
half-loaded engine must not answer. Nor does one answer that has not proved what it runs: inside the pause, after the load, it
scores the manifest's probe, and must say what the learner said.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from rollout.gate import Gate, Level
from rollout.probe import check_gap, largest_gap
from segue.clock import now
from segue.metrics import ActivityClock, Metrics, StateClock
from segue.ports.engine import Engine, EngineDead, PauseMode, StreamingEngine
from segue.ports.rollout import AbandonUpdate, BeginUpdate, Loaded, LoadFailed, NodeEvent
from segue.ports.transfer import Transfer, node_of
from segue.trajectory import NO_VERSION

if TYPE_CHECKING:
    from segue.ports.weights import ArrivingWeights, Manifest, StagedWeights, WeightReceiver

IN_WORDS = {"pause": "become idle", "load": "load", "probe": "score the probe", "resume": "resume"}
"""What an engine that is late in a phase of the swap did not do."""
DRAIN_LEVEL = {"turn": Level.TURNS, "episode": Level.LEASES}

log = logging.getLogger(__name__)


class NotLoaded(Exception):
    """An update ended without new weights; the old ones serve on. `phase` is where it stopped."""

    def __init__(self, phase: str, sentence: str) -> None:
        super().__init__(sentence)
        self.phase = phase


class Updater:
    """See the module. `metrics` are the rollout node's, `sync_metrics` and `clock` those of its weightsync target.

    `staged`: the weights wait beside those that run until the pause; else they are loaded as they arrive.
    `keeps`: requests go on with the KV they have; it is the newest update's `inflight` that says so.
    `probe_tolerance` (nats) is how far an engine may be from the learner's probe; None: there are no probes.
    """

    def __init__(
        self,
        name: str,
        engine: Engine,
        receiver: WeightReceiver,
        gate: Gate,
        *,
        metrics: Metrics,
        sync_metrics: Metrics,
        clock: StateClock,
        activity: ActivityClock,
        probe_tolerance: float | None,
        staged: bool = True,
        keeps: bool,
        emit: Callable[[NodeEvent, bool], None],
        spawn: Callable[[str, Coroutine[Any, Any, None]], asyncio.Task[None]],
    ) -> None:
        self._name = name
        self._engine = engine
        self._receiver = receiver
        self._gate = gate
        self._metrics = metrics
        self._sync = sync_metrics
        self._clock = clock
        self._activity = activity
        self._tolerance = probe_tolerance
        self._staged = staged
        self.keeps = keeps
        self._largest_gap = 0.0
        self._emit = emit
        self._spawn = spawn
        self._epoch = 0
        self._update = self._silent_upto = -1
        self._next: BeginUpdate | None = None
        self._worker: asyncio.Task[None] | None = None
        self._current: asyncio.Task[None] | None = None
        self._paused = False
        self._phase = "stage"
        clock.enter("wait_version")
        activity.begin("wait_weights")  # until the first weights are loaded

    @property
    def paused(self) -> bool:
        """Whether the engine is paused (or about to be): nothing may be aborted now."""
        return self._paused

    def begin(self, order: BeginUpdate) -> None:
        """Start an update; one that is still staging or draining is given up for it."""
        if order.update <= self._update:
            self._metrics.add("segue_messages_refused_total", reason="duplicate")
            return
        self._update, self._next = order.update, order
        if self._worker is None or self._worker.done():
            self._worker = self._spawn("updates", self._work())
        else:
            self._give_up()

    def abandon(self, order: AbandonUpdate) -> None:
        """Give an update up, unless its weights are being loaded: then it completes."""
        if order.update == self._update:
            log.info("update %d abandoned: %s", order.update, order.reason)
            self._next = None
            self._give_up()

    def stop(self) -> None:
        """The session is over: what can be abandoned is, and what completes says nothing."""
        self._next = None
        self._silent_upto = self._update
        self._give_up()

    def _give_up(self) -> None:
        if self._current is not None and not self._paused:
            self._current.cancel()

    async def _work(self) -> None:
        """One update after the other, always the newest that was ordered."""
        while self._next is not None:
            order, self._next = self._next, None
            self._current = self._spawn(f"update-{order.update}", self._run(order))
            await asyncio.wait([self._current])
            self._current = None

    # --- one update -------------------------------------------------------------------------------------------------

    async def _run(self, order: BeginUpdate) -> None:
        version = order.transfer.version
        self._phase = "stage"
        try:
            loaded = await self._update_to(order)
        except NotLoaded as error:
            log.warning("update %d to version %d: %s", order.update, version, error)
            self._sync.add("segue_weight_sync_failures_total", phase=error.phase)
            self._reopen()
            self._say(order, LoadFailed(order.update, version, str(error), False))
        except asyncio.CancelledError:
            self._reopen()
            raise
        except Exception as error:  # the gate stays closed: nothing may be asked of this engine any more
            self._sync.add("segue_weight_sync_failures_total", phase=self._phase)
            self._say(order, LoadFailed(order.update, version, str(error), True))
            raise EngineDead(f"version {version} could not be loaded: {error}") from error
        else:
            self._reopen()
            self._say(order, loaded)
        finally:
            self._clock.enter("wait_version")

    def _reopen(self) -> None:
        self._gate.set(Level.OPEN if self._engine.version != NO_VERSION else Level.CLOSED)

    def _say(self, order: BeginUpdate, event: Loaded | LoadFailed) -> None:
        if order.update == self._update and order.update > self._silent_upto:
            self._emit(event, True)

    async def _update_to(self, order: BeginUpdate) -> Loaded:
        began = now()
        deadline = began + order.deadline_seconds
        rank = self._rank(order)
        staged = await self._stage(order, rank, deadline) if self._staged else None
        stage_seconds = now() - began
        version = order.transfer.version
        if staged is not None and self._engine.version == version:  # held already: the node joined again under a new session
            return Loaded(order.update, version, stage_seconds, 0.0, 0.0)
        self._clock.enter("stage")
        began = now()
        await self._drain(order, deadline)
        drain_seconds, pause_seconds = await self._swap(order, rank, staged, began)
        for phase, seconds in (("stage", stage_seconds), ("drain", drain_seconds), ("pause", pause_seconds)):
            self._sync.observe("segue_weight_sync_seconds", seconds, phase=phase)
        self._metrics.set("segue_policy_version", version)
        self._metrics.set("segue_policy_update_timestamp_seconds", time.time())
        return Loaded(order.update, version, stage_seconds, drain_seconds, pause_seconds)

    def _rank(self, order: BeginUpdate) -> int:
        """Of the first member that is this node's; others follow it."""
        members = order.transfer.members
        with contextlib.suppress(ValueError):  # a list of a thousand is searched once
            return members.index(self._name) + 1
        nodes = [node_of(member) for member in members]
        if self._name not in nodes:
            raise NotLoaded("transfer", f"{self._name} is no member of transfer {order.transfer.transfer}")
        return nodes.index(self._name) + 1

    async def _stage(self, order: BeginUpdate, rank: int, deadline: float) -> StagedWeights:
        """Receive the weights while the engine goes on. Whatever the receiver raises, the old weights are untouched. Raises
        `NotLoaded`, or `EngineDead`."""
        transfer = order.transfer
        self._clock.enter("transfer")
        self._sync.set("segue_weight_sync_started_timestamp_seconds", time.time())
        try:
            async with asyncio.timeout_at(deadline):
                staged = await self._receiver.stage(transfer, rank)
        except TimeoutError:
            raise NotLoaded(
                "transfer", f"version {transfer.version} did not arrive within {order.deadline_seconds:g} s"
            ) from None
        except EngineDead:  # it can be given none any more
            raise
        except Exception as error:
            # `TransferFailed` is the expected one; naming it here would import torch.
            raise NotLoaded("transfer", f"version {transfer.version} did not arrive: {error}") from error
        finally:
            self._sync.set("segue_weight_sync_started_timestamp_seconds", 0.0)
        self._check(transfer, staged)
        return staged

    def _check(self, transfer: Transfer, weights: StagedWeights | ArrivingWeights) -> None:
        if weights.version != transfer.version:
            raise NotLoaded("stage", f"version {weights.version} arrived where {transfer.version} was announced")
        if self._tolerance is not None and weights.manifest.probe is None:
            raise NotLoaded("probe", f"version {transfer.version} came without a probe, which weightsync.probe_tokens asks for")

    async def _drain(self, order: BeginUpdate, deadline: float) -> None:
        """Let turns or whole episodes finish, as far as the order's patience reaches; what is left is interrupted."""
        level = DRAIN_LEVEL.get(order.inflight)
        if level is None:
            return
        self._gate.set(level)
        try:
            async with asyncio.timeout_at(min(deadline, now() + order.drain_seconds)):
                await self._gate.drained(episodes=order.inflight == "episode")
        except TimeoutError:
            log.info("update %d: %d requests still run after the drain", order.update, self._gate.running)

    async def _swap(self, order: BeginUpdate, rank: int, staged: StagedWeights | None, began: float) -> tuple[float, float]:
        """Pause, load, probe, resume. Returns (seconds until the engine was idle, seconds from then until it could go on).

        From here on nothing cancels the update: `begin`, `abandon` and `stop` leave a paused engine to it.
        """
        engine, version = self._engine, order.transfer.version
        self._epoch += 1
        epoch, first = self._epoch, engine.version == NO_VERSION
        kept, self.keeps = self.keeps, order.inflight == "keep"
        self._gate.set(Level.CLOSED)
        self._paused = True
        if not first:
            self._activity.begin("wait_weights")
        self._phase = "pause"
        patience = order.deadline_seconds if staged is not None else order.deadline_seconds + order.transfer.deadline_seconds
        try:
            async with asyncio.timeout(patience):
                await engine.pause(PauseMode.FREEZE if order.inflight == "keep" else PauseMode.ABORT, epoch)
                idle = now()
                self._clock.enter("load")
                self._phase = "load"
                try:
                    manifest = await (self._load(staged) if staged is not None else self._load_arriving(order, rank))
                except NotLoaded:  # nothing has changed; whatever else is raised leaves the engine paused for good
                    self.keeps = kept
                    await engine.resume(epoch)
                    raise
                self._sync.observe("segue_weight_sync_seconds", now() - idle, phase="load")
                self._phase = "probe"
                await self._prove(version, manifest)
                self._phase = "resume"
                proved = now()
                await engine.resume(epoch)
            self._sync.observe("segue_weight_sync_seconds", now() - proved, phase="resume")
            if first:
                self._activity.end("wait_weights")
            pause_seconds = now() - idle
            self._metrics.observe("segue_rollout_pause_seconds", pause_seconds, reason="update")
            return idle - began, pause_seconds
        except TimeoutError:
            raise EngineDead(f"the engine did not {IN_WORDS[self._phase]} within {patience:g} s") from None
        finally:
            self._paused = False
            if not first:
                self._activity.end("wait_weights")

    async def _load(self, staged: StagedWeights) -> Manifest:
        try:
            await self._engine.load(staged.version, staged)
        except ValueError as error:
            raise NotLoaded("load", str(error).rstrip(".")) from error
        return staged.manifest

    async def _load_arriving(self, order: BeginUpdate, rank: int) -> Manifest:
        """Take part in the transfer with the engine paused. It fails like a staged one until the first bucket is in."""
        transfer = order.transfer
        self._clock.enter("transfer")
        self._sync.set("segue_weight_sync_started_timestamp_seconds", time.time())
        try:
            arriving = await self._receiver.open(transfer, rank)
            try:
                self._check(transfer, arriving)
                assert isinstance(self._engine, StreamingEngine), "segue.config lets no other be without staging"
                await self._engine.load_arriving(arriving)
            finally:
                arriving.close()
        except (NotLoaded, EngineDead):
            raise
        except ValueError as error:
            raise NotLoaded("load", str(error).rstrip(".")) from error
        except Exception as error:  # `TransferFailed`, as in `_stage`
            raise NotLoaded("transfer", f"version {transfer.version} did not arrive: {error}") from error
        finally:
            self._sync.set("segue_weight_sync_started_timestamp_seconds", 0.0)
        return arriving.manifest

    async def _prove(self, version: int, manifest: Manifest) -> None:
        """The paused engine scores the probe. Raises `NotProven` if it does not say what the learner said."""
        probe = manifest.probe
        if self._tolerance is None or probe is None:
            return
        began = now()
        gap = largest_gap(await self._engine.score(probe.tokens), probe.logprobs)
        self._sync.observe("segue_weight_sync_seconds", now() - began, phase="probe")
        self._largest_gap = max(self._largest_gap, gap)
        self._metrics.set("segue_weight_probe_gap_nats", gap)
        self._metrics.set("segue_weight_probe_gap_max_nats", self._largest_gap)
        check_gap(self._name, version, gap, self._tolerance)
