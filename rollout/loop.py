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
from typing import TypeVar

from rollout.chat import ChatRenderer
from rollout.departed import Departed
from rollout.envclient import EnvCallFailed, EnvClient
from rollout.fit import beyond, fit_observation
from rollout.gate import Gate, Passage
from rollout.interrupts import Dropped, Interrupts, Parking
from rollout.ledger import EpisodeKv, Ledger
from rollout.log import BadLog, Budget, EpisodeLog, Phase, Piece
from rollout.straddle import Straddle
from rollout.wall import WallTime
from segue.clock import now
from segue.config.rollout import RolloutConfig
from segue.episode import DeltaBody, FailureClass, Outcome, TurnRecord
from segue.errors import UserError
from segue.metrics import ActivityClock, Counter, Histogram, Metrics
from segue.ports.engine import Chunk, Engine, EngineDead, FinishReason, GenerateRequest
from segue.ports.envpool import RESET_STEP, Create, Created, Observation, Resume, Step, observation_digest
from segue.ports.rollout import Fail, Finish, Lease, NodeEvent, Parked, Paused, Resumed, SliceUsed
from segue.trajectory import Author, context

DETAIL_CHARACTERS = 500
"""Of what the scheduler is told about a failure."""
PIECE_TOKENS = 2048
"""A long action reaches the scheduler in pieces of about so many tokens (17 bytes each, under the 64 kB limit of a flush)."""

T = TypeVar("T")
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Host:
    """What a node lends its loops. `keeps()`: does KV outlive the newest weights? `emit(event, urgent)` queues an event;
    `abort(loop, request id)` ends a request soon."""

    config: RolloutConfig
    keeps: Callable[[], bool]
    engine: Engine
    renderer: ChatRenderer
    env: EnvClient
    gate: Gate
    ledger: Ledger
    departed: Departed
    metrics: Metrics
    sampled: Counter
    cached: Counter
    turn_seconds: Histogram
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
        self._keeps = False  # when the running request was submitted
        self._interrupted = False
        self._entered = False
        self._requests = 0
        self._generating = 0.0
        self.request: str | None = None
        """The id of the request that the engine has, if any."""
        self._orders = Interrupts(self._abort)
        self._pinned = False
        self._returns = False
        self._wall_over = False
        self._cut = ""
        self._slice = lease.slice_tokens or math.inf
        self._slice_told = False
        self._lease_sampled = 0
        self._wall: WallTime  # begins with `run`

    # --- orders -----------------------------------------------------------------------------------------------------

    @property
    def dropped(self) -> str:
        """Why the attempt was told to stop; "" if it was not."""
        return self._orders.dropped

    def drop(self, reason: str) -> None:
        """Stop and discard."""
        self._orders.drop(reason)

    def park(self) -> None:
        """Let go of the episode as soon as nothing is lost by it. One that cannot be taken up again stays and goes on."""
        if self._movable:
            self._orders.park()

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

    def _abort(self) -> None:
        if self.request is not None:
            self._host.abort(self, self.request)

    # --- the episode ------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Raises `EngineDead`, and `AssertionError` for a mistake of ours; every other failure is the episode's: an event."""
        self._host.departed.back(self.lease.episode)
        self._wall = WallTime(self._host.config.wall_seconds, self.lease.snapshot.seconds, self._host.gate)
        try:
            await self._play()
        except Dropped:
            reason = self.dropped if self.dropped in ("fenced", "stopped") else "dropped"
            self._host.metrics.add("segue_discarded_tokens_total", self.unsent, reason=reason)
        except EngineDead as error:
            self._fail(FailureClass.INFRA, "engine_dead", error)
            raise
        except AssertionError as error:  # what the code takes for granted is not so: no other attempt can be trusted either
            self._fail(FailureClass.INFRA, "internal_error", error)
            where = f"episode {self.lease.episode}, attempt {self.lease.attempt}"
            raise AssertionError(f"{where}: {error}" if str(error) else where) from error
        except EnvCallFailed as error:
            self._fail(error.failure, error.reason, error, error.detail)
        except BadLog as error:
            self._fail(FailureClass.INFRA, "bad_log", error)
        except UserError as error:
            self._fail(FailureClass.DATA, "unusable", error)
        except Exception as error:
            log.exception("episode %d, attempt %d", *self.key)
            self._fail(FailureClass.INFRA, "internal_error", error)
        finally:
            self._wall.close()
            self._host.env.close(*self.key)
            self._host.departed.left(self.lease.episode, for_good=not self._returns)
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
                self._orders.check()
                phase = self.log.phase
                if phase is Phase.OVER:
                    assert self.log.outcome is not None
                    return self._finish(self.log.outcome)
                if self._orders.parking and self._movable:
                    break
                self._orders.parking = False  # the order came during the first step of an environment that is pinned
                if phase is Phase.STEP:
                    await self._step()
                elif self._wall_over or self._wall.over:
                    return self._finish(Outcome.TRUNCATED_WALL)
                else:
                    await self._generate()
        except Parking:
            pass
        self._returns = True
        return self._emit(Parked(*self.key, self.log.next_seq, self._wall.seconds), True)

    async def _open_environment(self) -> None:
        """Build the environment where the log says it was; the first time, write the prompt."""
        lease = self.lease
        request = Create(lease.episode, lease.attempt, lease.task, lease.member, self.log.environment())
        created = await self._wait_env(self._host.env.create(request), parkable=True)
        self._pinned = created.resume is Resume.PINNED
        if self.log.phase is Phase.RESET:
            self._write_prompt(created)

    def _write_prompt(self, created: Created) -> None:
        messages = created.observation.messages
        if beyond(messages, self._budget.max_tokens):
            raise UserError(
                f"The prompt of task {self.lease.task.id} has {sum(len(m.content) for m in messages)} characters, far more than "
                f"rollout.max_tokens = {self._budget.max_tokens} tokens hold: raise it, or leave the task out."
            )
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
        self._keeps = host.keeps()
        lineage = self._kv_version if self._keeps and self._kv_version is not None else host.engine.version
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
        gate = self._host.gate
        passage = Passage.LEASE if not self._entered else Passage.CONTINUE if self.log.action else Passage.TURN
        if gate.admits(passage):
            return
        with self._wall.excused():
            while not gate.admits(passage):
                await self._orders.wait(gate.changed(), parkable=True)

    async def _stream(self, request: GenerateRequest) -> FinishReason:
        """Take the request's chunks as they come. Nothing may be awaited between the gate and the engine."""
        host = self._host
        self.request, self._cut = request.id, ""
        watch = Straddle(host.renderer, self.log.action, self.log.stop)
        host.gate.enter(first=not self._entered)
        self._entered = True
        host.activity.begin("generate")
        began = now()
        finish: FinishReason | None = None
        with self._wall.alarm(self._ring) as alarm:
            try:
                async for chunk in host.engine.generate(request):
                    self._take(chunk, watch)
                    finish = chunk.finish
            finally:
                host.activity.end("generate")
                self._generating += now() - began - alarm.frozen
                self.request = None
                host.gate.leave()
        if finish is None:
            raise EngineDead(f"the engine ended request {request.id} without saying why")
        return finish

    def _ring(self) -> None:
        """The wall-time budget is used up."""
        self._wall_over = True
        self._orders.ring()

    def _take(self, chunk: Chunk, watch: Straddle) -> None:
        host, n = self._host, len(chunk.tokens)
        for admission in chunk.admissions:
            self._kv.admit(admission)
            host.cached.add(admission.cached)
        host.sampled.add(n)
        if n == 0:
            return
        if not (self._keeps or host.keeps()) and chunk.kv_version < chunk.spans[0][0]:
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
        self._orders.check()
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
        elif self._orders.parking:
            if self.log.action:  # else the turn had not begun, and its next lease does not go on with it
                self._emit(Paused(*self.key, "slice"), True)
        else:
            assert self._wall_over, f"request of {self.key} was aborted by nobody"

    def _complete(self) -> None:
        """The turn is over: close it, and give the action its text."""
        action = [*self.log.action, *self._piece.tokens]
        renderer = self._host.renderer
        if self._generating:  # else the turn was sampled elsewhere
            self._host.turn_seconds.observe(self._generating)
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
        ids = [] if last else self._fit(observation)
        self._write(DeltaBody(context(ids, Author.OBSERVATION, turn), record))

    def _fit(self, observation: Observation) -> list[int]:
        config = self._host.config
        return fit_observation(
            self._host.renderer,
            observation.messages,
            room=self.log.room,
            most=config.max_observation_tokens,
            action=config.max_turn_tokens,
        )

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
            seconds=self._wall.seconds,
            info=dict(log.info),
        )
        self._emit(finish, True)

    def _fail(self, failure: str, reason: str, error: Exception, detail: str = "") -> None:
        if self.dropped:
            return
        self._returns = failure != FailureClass.DATA
        log.warning("episode %d, attempt %d failed (%s, %s): %s", *self.key, failure, reason, error)
        self._host.metrics.add("segue_discarded_tokens_total", len(self._piece), reason="failed")
        self._emit(Fail(*self.key, failure, reason, detail or " ".join(str(error).split())[:DETAIL_CHARACTERS]), True)

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _write(self, body: DeltaBody, urgent: bool = False) -> None:
        self._emit(self.log.write(body, *self.key), urgent)

    def _emit(self, event: NodeEvent, urgent: bool) -> None:
        if not self.dropped:
            self._host.emit(event, urgent)

    async def _wait_env(self, future: asyncio.Future[T], parkable: bool) -> T:
        with self._host.activity.doing("wait_env"):
            await self._orders.wait(future, parkable)
        return future.result()
