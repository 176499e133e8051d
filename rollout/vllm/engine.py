"""vLLM as the node's engine (`segue.ports.engine.Engine`).

consumes       requests, and the control calls of one owner (pause, load, score, resume)
produces       chunks into each request's outbox, from vLLM's steps as they arrive
waits for      vLLM's steps and answers; `step_seconds` at most, then the engine is dead
unblocked by   vLLM's core, or its death
on cancel      closing a request's iterator aborts it in vLLM; the engine goes on

This file is its control; its requests are in `requests.py`, its deadlines and its death in `life.py`.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

from rollout.fitting import fit
from rollout.pauses import Pauses
from rollout.requests import check_request, check_scored
from rollout.stops import StopStrings
from rollout.vllm.core import Core, Step
from rollout.vllm.handover import Handover
from rollout.vllm.life import Life
from rollout.vllm.lineage import Lineages
from rollout.vllm.meter import Meter
from rollout.vllm.record import SCORE_PREFIX
from rollout.vllm.requests import Requests
from rollout.vllm.scoring import Scoring
from rollout.vllm.sequence import Sequence
from segue.clock import now
from segue.errors import UserError
from segue.ports.engine import Chunk, EngineCounts, GenerateRequest, PauseMode
from segue.ports.weights import ArrivingWeights, StagedWeights, WorkerWeights
from segue.trajectory import NO_VERSION

COLDEST = 0.01
"""vLLM takes any temperature between 0 and this one for this one."""
_TOO_EARLY = "came before any weights were loaded: load weights first."
_names = itertools.count()


class VllmEngine:
    """See the module, and the port for what each method promises."""

    def __init__(
        self,
        core: Core,
        model: Any,
        *,
        slots: int,
        max_tokens: int,
        score_tokens: int,
        ahead: int | None = None,
        chunk_tokens: int = 16,
        step_seconds: float = 120.0,
        tokenizer: Any = None,
        owns_core: bool = True,
    ) -> None:
        """
        core          vLLM; started with the engine, and stopped with it if `owns_core`
        model         the model on the meta device: what weights must fit
        slots         sequences decoded at once; vLLM must be able to run as many
        max_tokens    of a sequence; score_tokens: of one that is scored
        ahead         requests that vLLM is given beyond `slots` (None: an eighth)
        chunk_tokens  tokens are handed out this many at a time, and when a request ends or the engine pauses
        step_seconds  the engine declares itself dead when vLLM says nothing for longer than this
        tokenizer     for stop strings; None: there are none
        """
        self._core = core
        self._owns_core = owns_core
        self._model = model
        self._vocabulary: int = model.get_input_embeddings().weight.shape[0]
        self._max_tokens, self._score_tokens = max_tokens, min(score_tokens, max_tokens)
        self._name = f"e{next(_names)}"
        self._meter = Meter()
        self._version = NO_VERSION
        self._pauses = Pauses()
        self._resting: asyncio.Task[None] | None = None
        self._controlled = False
        self._scoring: Scoring | None = None
        self._life = Life(step_seconds, lambda why: self._requests.fail(why))
        stops = None if tokenizer is None else StopStrings(tokenizer, self._vocabulary)
        self._stop_strings = stops is not None
        self._requests = Requests(
            core,
            self._life,
            name=self._name,
            limit=slots + (max(1, slots // 8) if ahead is None else ahead),
            chunk_tokens=chunk_tokens,
            vocabulary=self._vocabulary,
            stops=stops,
            paused=lambda: self._pauses.paused,
        )

    @property
    def version(self) -> int:
        return self._version

    @property
    def dead(self) -> bool:
        """Whether the engine is gone: every call raises `EngineDead`."""
        return self._life.dead

    # --- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start vLLM. Raises `UserError` when it does not start."""
        self._life.begin()
        if self._owns_core:
            await self._core.start()
        self._core.on_step, self._core.on_death = self._take, self._life.die
        if self._core.dead:
            self._life.die(self._core.dead)
        self._requests.lineages = Lineages(self._name, self._core.block_size)
        self._life.spawn(self._requests.feed())

    async def stop(self) -> None:
        """End the engine; open requests raise `EngineDead`."""
        self._life.die("the engine was stopped")
        await self._life.end()
        if self._owns_core:
            await self._core.stop()

    # --- requests ---------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """Chunks of one action. Raises `UserError` for a request that cannot be served and `EngineDead`."""
        sequence = self._submit(request)
        try:
            await self._requests.hold(sequence)
            while True:
                chunk = await sequence.out.get()
                yield chunk
                if chunk.finish is not None:
                    return
        finally:
            self._requests.release(sequence)

    def _submit(self, request: GenerateRequest) -> Sequence:
        self._life.check()
        check_request(request, self._max_tokens, self._vocabulary, self._stop_strings)
        if 0.0 < request.temperature < COLDEST:
            raise UserError(f"Request {request.id} has temperature {request.temperature}: vLLM needs 0 or at least {COLDEST}.")
        if request.id in self._requests:
            raise UserError(f"Request id {request.id} is already in use: give every request an id of its own.")
        if self._version == NO_VERSION and not self._pauses.paused:
            raise UserError(f"Request {request.id} {_TOO_EARLY}")
        return self._requests.open(request)

    async def abort(self, request_id: str) -> bool:
        self._life.check()
        return self._requests.abort(request_id)

    def forget(self, episode: int) -> None:
        self._requests.lineages.forget(episode)

    def counts(self) -> EngineCounts:
        requests = self._requests
        return self._meter.counts(
            running=requests.running,
            waiting=requests.waiting,
            evictions=requests.lineages.evictions,
            discarded=requests.discarded,
            unclaimed=requests.unclaimed,
        )

    # --- vLLM's steps -----------------------------------------------------------------------------------------------

    def _take(self, step: Step) -> None:
        """Everything of one step: first who was admitted, then what was sampled, then who is gone."""
        if self._life.dead:
            return
        self._life.silence.heard()
        try:
            for admitted in step.record.admitted:
                self._requests.admitted(admitted, step.version)
            decoded = 0
            for output in step.outputs:
                if not output.request.startswith(SCORE_PREFIX):
                    decoded += self._requests.sampled(output, step)
                elif self._scoring is not None:
                    self._scoring.take(output)
        except (ValueError, FloatingPointError) as error:
            self._life.die(f"{type(error).__name__}: {error}")
            return
        self._meter.step(step.record, decoded)
        self._requests.gone(step.record.ended)
        self._life.silence.expect(self._requests.inside and not self._pauses.paused)

    # --- control ----------------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode, epoch: int) -> None:
        """A second pause of the same epoch only waits; one of a later epoch may turn FREEZE into ABORT."""
        self._life.check()
        if not self._pauses.counts(epoch):
            return
        if self._pauses.pause(mode, epoch):
            self._resting = self._life.spawn(self._come_to_rest(mode, self._resting))
        assert self._resting is not None
        await asyncio.wait([self._resting])
        self._life.check()

    async def _come_to_rest(self, mode: PauseMode, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        requests = self._requests
        if mode is PauseMode.ABORT:
            requests.end_held()
        async with requests.sending:
            await self._life.answer(self._core.pause(keep=mode is PauseMode.FREEZE))
        assert mode is not PauseMode.ABORT or not requests.inside, "vLLM paused and did not end everything"
        self._life.silence.expect(False)
        requests.flush()

    async def resume(self, epoch: int) -> None:
        self._life.check()
        if not self._pauses.counts(epoch):
            return
        assert not self._controlled, "resumed while weights were being loaded or sequences scored"
        await self._life.answer(self._core.resume())
        self._pauses.resume(epoch)
        if self._version == NO_VERSION:
            self._requests.refuse_all(_TOO_EARLY)
        self._life.silence.expect(self._requests.inside)
        self._requests.wake()

    def _begin_control(self, what: str) -> None:
        self._life.check()
        idle = self._pauses.paused and self._resting is not None and self._resting.done()
        assert idle and not self._controlled, f"{what} while the engine is paused"

    async def load(self, version: int, weights: StagedWeights) -> None:
        if isinstance(weights, WorkerWeights):
            await self._load(version, lambda: self._load_in_workers(weights))
        else:
            await self._load(version, lambda: self._load_from_here(version, weights))

    async def load_arriving(self, weights: ArrivingWeights) -> None:
        """As `load`, of what arrives in the workers meanwhile. Any failure, even before the first bucket, ends the engine."""
        assert isinstance(weights, WorkerWeights), "vLLM's workers receive for themselves"
        await self._load(weights.version, lambda: self._load_in_workers(weights))

    async def _load(self, version: int, load: Callable[[], Awaitable[None]]) -> None:
        self._begin_control("weights are loaded")
        if version < 0 or version < self._version:
            raise ValueError(
                f"Weights of version {version} come after those of version {self._version}: version ids are never reused."
            )
        self._controlled = True
        began = now()
        try:
            await load()
        finally:
            self._controlled = False
        self._meter.load_seconds += now() - began
        if version != self._version:
            self._version = version
            self._requests.lineages.loaded(version, self._requests.salts)

    async def _load_in_workers(self, weights: WorkerWeights) -> None:
        await self._swap(weights.version, self._core.load_staged(weights.version, weights.transfer), weights.seconds)

    async def _swap(self, version: int, load: Coroutine[Any, Any, None], seconds: float = 0.0) -> None:
        try:
            await self._life.answer(load, seconds)
        except asyncio.CancelledError:
            self._life.die(f"loading version {version} ended half way")
            raise

    async def _load_from_here(self, version: int, weights: StagedWeights) -> None:
        """Weights that lie in this process (tests, tools): checked, and handed to the workers."""
        fitted = await asyncio.to_thread(fit, self._model, weights)
        handover = await asyncio.to_thread(Handover, fitted)
        try:
            await self._swap(version, self._core.load_handover(version, handover))
        finally:
            handover.close()

    async def connect_workers(self, info: dict[str, Any]) -> None:
        """Tell the weight-transfer backend of every worker where its orders come from. `EngineDead` if one cannot obey."""
        self._life.check()
        await self._life.answer(self._core.connect_workers(info))

    async def score(self, tokens: list[int]) -> list[float]:
        self._begin_control("sequences are scored")
        if self._version == NO_VERSION:
            raise UserError(f"A sequence to score {_TOO_EARLY}")
        check_scored(tokens, self._score_tokens, self._vocabulary)
        self._controlled = True
        scoring = self._scoring = Scoring(tokens, f"{SCORE_PREFIX}{self._name}-{self._meter.scored_tokens}-{len(tokens)}")
        self._requests.hold_aborts()
        try:
            logprobs = await self._life.answer(scoring.run(self._core))
        finally:
            self._controlled = False
            self._scoring = None
            self._requests.let_aborts()
        self._meter.scored_tokens += len(tokens)
        return logprobs
