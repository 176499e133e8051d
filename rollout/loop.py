"""One episode attempt on this node, from its lease to its end (docs/protocol.md, "An episode").

consumes       the lease; chunks of the engine; replies of its environment; drop, park and extend orders
produces       deltas and what becomes of the episode, as events; one request at a time to the engine
waits for      the gate, a chunk, an environment's reply
unblocked by   the update procedure, the engine, a reply or its deadline, a drop, a park order, the wall-time budget
on cancel      nothing is sent any more; environment and KV are released

What is done next follows from the log alone (`rollout.log`), so an episode that was resumed goes the same way as any other.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from rollout.chat import ChatRenderer
from rollout.envclient import EnvCallFailed, EnvClient
from rollout.fit import fit_delta
from rollout.gate import Gate, Passage
from rollout.ledger import EpisodeKv, Ledger
from rollout.log import BadLog, Budget, EpisodeLog, Phase, Piece
from rollout.straddle import Straddle
from segue.clock import now
from segue.config.rollout import RolloutConfig
from segue.episode import DeltaBody, FailureClass, Outcome, TurnRecord
from segue.errors import UserError
from segue.metrics import ActivityClock, Metrics
from segue.ports.engine import Chunk, Engine, EngineDead, FinishReason, GenerateRequest
from segue.ports.envpool import RESET_STEP, Create, Created, Observation, Resume, Step, observation_digest
from segue.ports.scheduler import Fail, Finish, Lease, NodeEvent, Parked, Paused, Resumed, SliceUsed
from segue.trajectory import Author, context

PIECE_TOKENS = 2048
"""A long action reaches the scheduler in pieces of about so many tokens (17 bytes each, under the 64 kB limit of a flush)."""

T = TypeVar("T")
log = logging.getLogger(__name__)


class Dropped(Exception):
    """The attempt was told to stop: nothing of it is sent any more."""


class _Parking(Exception):
    """A wait that a park order may end was ended by one."""


@dataclass(frozen=True)
class Host:
    """What a node lends its loops. `emit(event, urgent)` queues an event; `abort(loop, request id)` ends a request soon."""

    config: RolloutConfig
    keep_kv: bool
    engine: Engine
    renderer: ChatRenderer
    env: EnvClient
    gate: Gate
    ledger: Ledger
    metrics: Metrics
    activity: ActivityClock
    emit: Callable[[NodeEvent, bool], None]
    abort: Callable[[EpisodeLoop, str], None]


class EpisodeLoop:
    """Runs one lease. `run` returns when the episode has left the node; `dropped` then says whether it was dropped."""

    def __init__(self, lease: Lease, host: Host) -> None:
        self.lease = lease
        self.key = (lease.episode, lease.attempt)
        self._host = host
        config = host.config
        closing = len(host.renderer.close_tokens)
        self._budget = Budget(config.max_turns, config.max_tokens, config.max_turn_tokens, closing)
        self.log = EpisodeLog(self._budget)
        self._piece = Piece(-1)
        self._kv: EpisodeKv = host.ledger.lease()
        self._kv_version: int | None = None
        self._interrupted = False
        self._entered = False
        self._requests = 0
        self._generating = 0.0
        self.request: str | None = None
        """The id of the request that the engine has, if any."""
        self.dropped = ""
        self._parking = False
        self._pinned = False
        self._wall_over = False
        self._cut = ""
        self._signal: asyncio.Future[None] | None = None
        self._slice = lease.slice_tokens or math.inf
        self._slice_told = False
        self._lease_sampled = 0
        self._started = 0.0
        self._excused = 0.0

    # --- orders -----------------------------------------------------------------------------------------------------

    def drop(self, reason: str) -> None:
        """Stop and discard."""
        self.dropped = self.dropped or reason
        self._interrupt()

    def park(self) -> None:
        """Let go of the episode as soon as nothing is lost by it. One that cannot be taken up again stays and goes on."""
        if self._movable:
            self._parking = True
            self._interrupt()

    def extend(self, slice_tokens: int) -> None:
        """Another slice."""
        self._slice += slice_tokens
        self._slice_told = False

    @property
    def _movable(self) -> bool:
        """Whether a later lease can go on with the episode: an environment that can only be reset may not have taken a step."""
        return not self._pinned or self.log.turn < 1

    @property
    def unsent(self) -> int:
        """Tokens sampled that no delta holds yet."""
        return len(self._piece)

    def _interrupt(self) -> None:
        if self._signal is not None and not self._signal.done():
            self._signal.set_result(None)
        if self.request is not None:
            self._host.abort(self, self.request)

    # --- the episode ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Raises `EngineDead`; every other failure is the episode's own, and an event."""
        self._started = now()
        try:
            await self._play()
        except Dropped:
            reason = self.dropped if self.dropped in ("fenced", "stopped") else "dropped"
            self._host.metrics.add("segue_discarded_tokens_total", self.unsent, reason=reason)
        except EngineDead as error:
            self._fail(FailureClass.INFRA, "engine_dead", error)
            raise
        except EnvCallFailed as error:
            self._fail(error.failure, error.reason, error)
        except BadLog as error:
            self._fail(FailureClass.INFRA, "bad_log", error)
        except UserError as error:
            self._fail(FailureClass.DATA, "unusable", error)
        except Exception as error:
            log.exception("episode %d, attempt %d", *self.key)
            self._fail(FailureClass.INFRA, "internal_error", error)
        finally:
            self._host.env.close(*self.key)
            self._host.engine.forget(self.lease.episode)
            if self._entered:
                self._host.gate.ended()

    async def _play(self) -> None:
        self.log = EpisodeLog.restore(self.lease.snapshot, self._budget)
        self._interrupted = bool(self.log.action) and self.log.waiting is None
        self._kv = self._host.ledger.lease(elsewhere=self.log.computed)
        try:
            if self.log.phase is not Phase.OVER:
                await self._open_environment()
            while True:
                self._check_dropped()
                phase = self.log.phase
                if phase is Phase.OVER:
                    assert self.log.outcome is not None
                    return self._finish(self.log.outcome)
                if self._parking and self._movable:
                    break
                self._parking = False  # the order came during the first step of an environment that is pinned
                if phase is Phase.STEP:
                    await self._step()
                elif self._wall_over or self._seconds() >= self._host.config.wall_seconds:
                    return self._finish(Outcome.TRUNCATED_WALL)
                else:
                    await self._generate()
        except _Parking:
            pass
        return self._emit(Parked(*self.key, self.log.next_seq, self._seconds()), True)

    async def _open_environment(self) -> None:
        """Build the environment where the log says it was; the first time, write the prompt."""
        lease = self.lease
        request = Create(lease.episode, lease.attempt, lease.task, lease.member, self.log.environment())
        created = await self._wait_env(self._host.env.create(request), parkable=True)
        self._pinned = created.resume is Resume.PINNED
        if self.log.phase is Phase.RESET:
            self._write_prompt(created)

    def _write_prompt(self, created: Created) -> None:
        prompt = self._host.renderer.prompt_log(created.observation)
        room = self._budget.max_tokens - self._budget.closing - len(prompt)
        if room < 1:
            raise UserError(
                f"The prompt of task {self.lease.task.id} has {len(prompt)} tokens and leaves no room for an action within "
                f"rollout.max_tokens = {self._budget.max_tokens}: raise it, or leave the task out."
            )
        record = TurnRecord(
            turn=RESET_STEP,
            reward=0.0,
            terminated=False,
            truncated=False,
            action="",
            observation_hash=observation_digest(created.observation),
            snapshot=created.snapshot,
            info={},
            stop=created.observation.stop,
        )
        self._write(DeltaBody(prompt, record))

    # --- one turn ---------------------------------------------------------------------------------------------------

    async def _generate(self) -> None:
        """One request: to the end of the turn, or until something interrupts it."""
        log, host = self.log, self._host
        self._piece = Piece(log.turn)
        if log.allowance < 1:  # an interrupted turn had used it up
            self._complete()
            return
        await self._pass_gate()
        if log.newest_version > host.engine.version:
            raise BadLog(f"tokens of version {log.newest_version} came to a node that runs {host.engine.version}")
        self._requests += 1
        lineage = self._kv_version if host.keep_kv and self._kv_version is not None else host.engine.version
        lease = self.lease
        request = GenerateRequest(
            id=f"{lease.episode}.{lease.attempt}.{self._requests}",
            tokens=list(log.tokens),
            max_tokens=log.allowance,
            temperature=lease.sampling.temperature,
            stop_tokens=host.renderer.stop_tokens,
            stop_strings=log.stop,
            seed=lease.sampling.seed,
            offset=log.sampled,
            priority=lease.priority,
            episode=lease.episode,
            group=lease.group,
            lineage=lineage,
        )
        self._kv.request(len(log.tokens), log.prompt, lineage)
        if self._interrupted:
            self._interrupted = False
            self._emit(Resumed(*self.key), False)
        finish = await self._stream(request)
        self._after(finish)

    async def _pass_gate(self) -> None:
        """Wait until a request may start. Waiting for weights is not charged to the episode's wall time."""
        gate, began = self._host.gate, now()
        passage = Passage.LEASE if not self._entered else Passage.CONTINUE if self.log.action else Passage.TURN
        try:
            while not gate.admits(passage):
                await self._wait(gate.changed(), parkable=True)
        finally:
            self._excused += now() - began

    async def _stream(self, request: GenerateRequest) -> FinishReason:
        """Take the request's chunks as they come. Nothing may be awaited between the gate and the engine."""
        host = self._host
        self.request, self._cut = request.id, ""
        watch = Straddle(host.renderer, self.log.action, self.log.stop)
        left = max(0.0, host.config.wall_seconds - self._seconds())
        timer = asyncio.get_running_loop().call_later(left, self._wall)
        host.gate.enter(first=not self._entered)
        self._entered = True
        host.activity.begin("generate")
        began = now()
        finish: FinishReason | None = None
        try:
            async for chunk in host.engine.generate(request):
                self._take(chunk, watch)
                finish = chunk.finish
        finally:
            host.activity.end("generate")
            self._generating += now() - began
            timer.cancel()
            self.request = None
            host.gate.leave()
        if finish is None:
            raise EngineDead(f"the engine ended request {request.id} without saying why")
        return finish

    def _wall(self) -> None:
        self._wall_over = True
        self._interrupt()

    def _take(self, chunk: Chunk, watch: Straddle) -> None:
        host, n = self._host, len(chunk.tokens)
        for admission in chunk.admissions:
            for cause, tokens in self._kv.admit(admission).items():
                host.metrics.add("segue_prefill_tokens_total", tokens, cause=cause)
            host.metrics.add("segue_cached_tokens_total", admission.cached)
        host.metrics.add("segue_decode_tokens_total", n)
        if n == 0:
            return
        if not host.keep_kv and chunk.kv_version < chunk.spans[0][0]:
            self._cut = self._cut or "stale_kv"
        keep = 0 if self._cut else watch.keep(self._piece.tokens, chunk.tokens)
        self._kv.sampled(keep)
        self._piece.take(chunk, keep)
        self._kv_version = chunk.kv_version
        self._lease_sampled += keep
        if keep < n:
            host.metrics.add("segue_discarded_tokens_total", n - keep, reason="stopped")
            self._cut = self._cut or "stop_string"
            if self.request is not None and chunk.finish is None:
                host.abort(self, self.request)
        if self._lease_sampled >= self._slice and not self._slice_told and not self._pinned:  # what cannot be parked says nothing
            self._slice_told = True
            self._emit(SliceUsed(*self.key), False)
        if len(self._piece) >= PIECE_TOKENS and chunk.finish is None and not self._cut:
            self._write(self._piece.flush())

    def _after(self, finish: FinishReason) -> None:
        """What the end of a request means for the turn."""
        self._check_dropped()
        if self._cut == "stop_string" or (finish in (FinishReason.STOP, FinishReason.LENGTH) and not self._cut):
            self._complete()
            return
        if len(self._piece):
            self._write(self._piece.flush(), urgent=True)
        if self._cut:  # a request slipped in before an update and read old KV: what it sampled is gone, it starts again
            return
        self._interrupted = True
        if finish is FinishReason.PAUSED:
            self._emit(Paused(*self.key, "update"), True)
        elif self._parking:
            if self.log.action:  # else the turn had not begun, and its next lease does not go on with it
                self._emit(Paused(*self.key, "slice"), True)
        else:
            assert self._wall_over, f"request of {self.key} was aborted by nobody"

    def _complete(self) -> None:
        """The turn is over: close it, and give the action its text."""
        action = [*self.log.action, *self._piece.tokens]
        renderer = self._host.renderer
        if self._generating:  # else the turn was sampled elsewhere
            self._host.metrics.observe("segue_turn_generate_seconds", self._generating)
            self._generating = 0.0
        self._write(self._piece.complete(renderer.closing(action), renderer.text(action)))

    async def _step(self) -> None:
        """Give the action to the environment and write down what it did. A park order waits, so that no step runs twice."""
        turn, action = self.log.turn, self.log.waiting
        assert action is not None
        future = self._host.env.step(Step(*self.key, turn, action))
        stepped = await self._wait_env(future, parkable=False)
        result, snapshot = stepped.result, stepped.snapshot
        if not math.isfinite(result.reward):
            raise EnvCallFailed(FailureClass.DATA, "bad_reward", f"turn {turn} was rewarded with {result.reward}")
        observation = result.observation
        record = TurnRecord(
            turn=turn,
            reward=float(result.reward),
            terminated=result.terminated,
            truncated=result.truncated and not result.terminated,
            action=action,
            observation_hash=observation_digest(observation),
            snapshot=snapshot,
            info=result.info,
            stop=observation.stop,
        )
        # Nothing is sampled after the last observation, so none of it goes into the context.
        last = result.terminated or result.truncated or turn + 1 >= self._budget.max_turns
        ids = [] if last else self._observation(observation)
        self._write(DeltaBody(context(ids, Author.OBSERVATION, turn), record))

    def _observation(self, observation: Observation) -> list[int]:
        """The ids of an observation that fits: whole if it leaves room to sample, else cut so that a whole action still fits.

        Where not even the note of the cut would fit, the ids fill what is left of the context: the episode is out of tokens.
        """
        renderer, config, room = self._host.renderer, self._host.config, self.log.room
        most = config.max_observation_tokens or room
        ids = renderer.delta(observation.messages)
        if len(ids) <= min(most, room - 1):
            return ids
        cut = fit_delta(renderer, observation.messages, min(most, room - config.max_turn_tokens))
        return cut if cut is not None else ids[: max(room, 0)]

    # --- ends -------------------------------------------------------------------------------------------------------

    def _finish(self, outcome: Outcome) -> None:
        log = self.log
        finish = Finish(
            episode=self.lease.episode,
            attempt=self.lease.attempt,
            next_seq=log.next_seq,
            outcome=outcome,
            turns=log.turn,
            reward=log.reward,
            checksum=log.checksum,
            seconds=self._seconds(),
            info=dict(log.info),
        )
        self._emit(finish, True)

    def _fail(self, failure: str, reason: str, error: Exception) -> None:
        if self.dropped:
            return
        log.warning("episode %d, attempt %d failed (%s, %s): %s", *self.key, failure, reason, error)
        self._host.metrics.add("segue_discarded_tokens_total", len(self._piece), reason="failed")
        self._emit(Fail(*self.key, failure, reason), True)

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _write(self, body: DeltaBody, urgent: bool = False) -> None:
        self._emit(self.log.write(body, *self.key), urgent)

    def _emit(self, event: NodeEvent, urgent: bool) -> None:
        if not self.dropped:
            self._host.emit(event, urgent)

    def _seconds(self) -> float:
        """Wall time used, earlier attempts included, waits for weights excluded."""
        return self.lease.snapshot.seconds + now() - self._started - self._excused

    def _check_dropped(self) -> None:
        if self.dropped:
            raise Dropped

    async def _wait(self, future: asyncio.Future[Any], parkable: bool) -> None:
        """Until `future` is done. A drop ends the wait, and so does a park order where it may."""
        while not future.done():
            self._signal = asyncio.get_running_loop().create_future()
            self._check_dropped()
            if parkable and self._parking:
                raise _Parking
            await asyncio.wait({future, self._signal}, return_when=asyncio.FIRST_COMPLETED)
        self._check_dropped()

    async def _wait_env(self, future: asyncio.Future[T], parkable: bool) -> T:
        with self._host.activity.doing("wait_env"):
            await self._wait(future, parkable)
        return future.result()
