"""vLLM as the node's engine (`segue.ports.engine.Engine`).

consumes       requests, and the control calls of one owner (pause, load, score, resume)
produces       chunks into each request's outbox, from vLLM's steps as they arrive
waits for      vLLM's steps and answers; `step_seconds` at most, then the engine is dead
unblocked by   vLLM's core, or its death
on cancel      closing a request's iterator aborts it in vLLM; the engine goes on

Requests are held back here while the engine is paused, and beyond `slots` (and a few ahead, so that vLLM always has the next one
at hand). What vLLM has been given it runs by priority.

A request that is told to end (`abort`, a pause) has ended when vLLM's scheduler says so: everything it had sampled until then
came before. Only a consumer that is gone, or a stop string, leaves tokens behind: vLLM may have sampled a few more by then.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections.abc import AsyncIterator, Coroutine, Iterable
from typing import Any, TypeVar

from rollout.fitting import fit
from rollout.pauses import Pauses
from rollout.requests import check_request, check_scored
from rollout.stops import StopStrings
from rollout.vllm.core import LENGTH, STOP, Core, Output, Step, arrival_time, sampling
from rollout.vllm.handover import Handover
from rollout.vllm.lineage import Lineages
from rollout.vllm.meter import Meter
from rollout.vllm.record import SCORE_PREFIX, Admitted
from rollout.vllm.scoring import Scoring
from rollout.vllm.sequence import Sequence
from rollout.vllm.silence import Silence
from segue.clock import now
from segue.errors import UserError
from segue.ports.engine import Chunk, EngineCounts, EngineDead, FinishReason, GenerateRequest, PauseMode
from segue.ports.weights import StagedWeights
from segue.trajectory import NO_VERSION

T = TypeVar("T")

COLDEST = 0.01
"""vLLM takes any temperature between 0 and this one for this one."""
_TOO_EARLY = "came before any weights were loaded: load weights first."
_FINISH = {STOP: FinishReason.STOP, LENGTH: FinishReason.LENGTH}
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
        self._limit = slots + (max(1, slots // 8) if ahead is None else ahead)
        self._max_tokens, self._score_tokens = max_tokens, min(score_tokens, max_tokens)
        self._chunk_tokens, self._step_seconds = chunk_tokens, step_seconds
        self._stops = None if tokenizer is None else StopStrings(tokenizer, self._vocabulary)
        self._name = f"e{next(_names)}"
        self._lineages = Lineages(self._name, 1)
        self._meter = Meter()
        self._silence = Silence(step_seconds, lambda: self._die(f"vLLM said nothing for {step_seconds:g} s"))

        self._open: dict[str, Sequence] = {}
        self._held: list[tuple[tuple[int, int], Sequence]] = []  # a heap
        self._inside: dict[str, Sequence] = {}
        self._arrivals = itertools.count()
        self._sending = asyncio.Lock()
        self._feed = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()

        self._version = NO_VERSION
        self._pauses = Pauses()
        self._resting: asyncio.Task[None] | None = None
        self._controlled = False
        self._scoring: Scoring | None = None
        self._late_aborts: list[str] = []
        self._dead: EngineDead | None = None
        self._death: asyncio.Future[None] | None = None

    @property
    def version(self) -> int:
        return self._version

    @property
    def dead(self) -> bool:
        """Whether the engine is gone: every call raises `EngineDead`."""
        return self._dead is not None

    # --- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Start vLLM. Raises what it raises."""
        assert self._death is None, "started twice"
        self._death = asyncio.get_running_loop().create_future()
        if self._owns_core:
            await self._core.start()
        self._core.on_step, self._core.on_death = self._take, self._die
        if self._core.dead:
            self._die(self._core.dead)
        self._lineages = Lineages(self._name, self._core.block_size)
        self._spawn(self._feeder())

    async def stop(self) -> None:
        """End the engine; open requests raise `EngineDead`."""
        self._die("the engine was stopped")
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        if self._owns_core:
            await self._core.stop()

    def _die(self, why: str) -> None:
        if self._dead is not None:
            return
        self._dead = EngineDead(why)
        self._silence.rest()
        for sequence in self._open.values():
            sequence.out.fail(EngineDead(why))
        self._open.clear()
        self._held.clear()
        if self._death is not None and not self._death.done():
            self._death.set_result(None)

    def _check(self) -> None:
        if self._dead is not None:
            raise EngineDead(str(self._dead))  # one exception for each who hears of it
        if self._death is None:
            raise RuntimeError("the engine was used before `start` had returned")

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended_task)
        return task

    def _ended_task(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._die(f"{type(error).__name__}: {error}")

    async def _answer(self, call: Coroutine[Any, Any, T]) -> T:
        """vLLM's answer; its death or its silence ends the engine, and raises `EngineDead`."""
        assert self._death is not None
        task = asyncio.ensure_future(call)
        either: list[asyncio.Future[Any]] = [task, self._death]
        await asyncio.wait(either, timeout=self._step_seconds, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            task.cancel()
            self._die(f"vLLM did not answer within {self._step_seconds:g} s")
            self._check()
        try:
            return task.result()
        except Exception as error:
            self._die(f"{type(error).__name__}: {error}")
            raise EngineDead(str(self._dead)) from error

    # --- requests ---------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """Chunks of one action. Raises `UserError` for a request that cannot be served and `EngineDead`."""
        sequence = self._submit(request)
        try:
            await self._hold(sequence)
            while True:
                chunk = await sequence.out.get()
                yield chunk
                if chunk.finish is not None:
                    return
        finally:
            self._release(sequence)

    def _submit(self, request: GenerateRequest) -> Sequence:
        """From here on the request is known: a pause ends it, whatever it still waits for."""
        self._check()
        check_request(request, self._max_tokens, self._vocabulary, self._stops is not None)
        if 0.0 < request.temperature < COLDEST:
            raise UserError(f"Request {request.id} has temperature {request.temperature}: vLLM needs 0 or at least {COLDEST}.")
        if request.id in self._open:
            raise UserError(f"Request id {request.id} is already in use: give every request an id of its own.")
        if self._version == NO_VERSION and not self._pauses.paused:
            raise UserError(f"Request {request.id} {_TOO_EARLY}")
        sequence = self._open[request.id] = Sequence(request, next(self._arrivals))
        return sequence

    async def _hold(self, sequence: Sequence) -> None:
        """Let it wait for its turn, once the vocabulary is sifted for its stop strings."""
        strings, stops = sequence.request.stop_strings, self._stops
        if strings:
            assert stops is not None
            if stops.matcher(strings) is None:
                await asyncio.to_thread(stops.prepare, strings)
            sequence.stops_text = stops.matcher(strings)
        if self._open.get(sequence.request.id) is sequence:
            heapq.heappush(self._held, (sequence.order, sequence))
            self._feed.set()

    async def _feeder(self) -> None:
        """Give vLLM what it has room for, the first in order first."""
        while self._dead is None:
            while self._held and not self._pauses.paused and len(self._inside) < self._limit:
                _, sequence = heapq.heappop(self._held)
                if self._open.get(sequence.request.id) is sequence:
                    await self._give(sequence)
            self._feed.clear()
            await self._feed.wait()

    async def _give(self, sequence: Sequence) -> None:
        request = sequence.request
        sequence.name = f"{self._name}-{sequence.arrival}-{request.id}"
        sequence.salt = self._lineages.salt(request)
        self._inside[sequence.name] = sequence
        self._silence.expect(True)
        params = sampling(
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            stop_tokens=[token for token in request.stop_tokens if 0 <= token < self._vocabulary],
            extra={"seed": request.seed, "offset": request.offset},
        )
        async with self._sending:
            submission = self._core.submit(
                sequence.name,
                request.tokens,
                params,
                salt=sequence.salt,
                priority=request.priority,
                arrival=arrival_time(),
            )
            await self._answer(submission)

    def _release(self, sequence: Sequence) -> None:
        """The consumer is gone."""
        if self._open.get(sequence.request.id) is sequence:
            del self._open[sequence.request.id]
            self._give_up(sequence)

    def _give_up(self, sequence: Sequence) -> None:
        """Whatever vLLM still samples for it is nobody's."""
        sequence.given_up = True
        if sequence.name in self._inside and self._dead is None:
            self._tell_to_end([sequence.name])

    def _tell_to_end(self, names: list[str]) -> None:
        if self._scoring is not None:  # what is frozen must not be touched now
            self._late_aborts += names
        else:
            self._spawn(self._abort(names))

    async def _abort(self, names: list[str]) -> None:
        async with self._sending:  # vLLM forgets an abort of what it does not know yet
            await self._answer(self._core.abort(names))

    async def abort(self, request_id: str) -> bool:
        self._check()
        sequence = self._open.get(request_id)
        if sequence is None:
            return False
        if sequence.name not in self._inside:
            self._end(sequence, FinishReason.ABORTED)
        elif sequence.wants is None:
            sequence.wants = FinishReason.ABORTED
            self._tell_to_end([sequence.name])
        return True

    def forget(self, episode: int) -> None:
        self._lineages.forget(episode)

    def counts(self) -> EngineCounts:
        running = sum(sequence.running for sequence in self._open.values())
        return self._meter.counts(running=running, waiting=len(self._open) - running, evictions=self._lineages.evictions)

    # --- vLLM's steps -----------------------------------------------------------------------------------------------

    def _take(self, step: Step) -> None:
        """Everything of one step: first who was admitted, then what was sampled, then who is gone."""
        if self._dead is not None:
            return
        self._silence.heard()
        try:
            for admitted in step.record.admitted:
                self._admitted(admitted, step)
            decoded = sum(self._sampled(output, step) for output in step.outputs)
        except (ValueError, FloatingPointError) as error:
            self._die(f"{type(error).__name__}: {error}")
            return
        self._meter.step(step.record, decoded)
        for name in step.record.ended:
            self._gone(name)
        self._silence.expect(bool(self._inside) and not self._pauses.paused)

    def _admitted(self, admitted: Admitted, step: Step) -> None:
        sequence = self._inside.get(admitted.request)
        if sequence is None or sequence.given_up:
            self._meter.unclaimed_tokens += admitted.prefilled
            return
        note = self._lineages.again if admitted.again else self._lineages.first
        version = self._number(step.version)
        tokens = sequence.tokens
        sequence.admitted(note(sequence.request, sequence.salt, tokens, admitted.cached, admitted.prefilled, version))

    @staticmethod
    def _number(version: str) -> int:
        if not version.isdecimal():
            raise ValueError(f"vLLM says that it sampled under weights of version {version!r}")
        return int(version)

    def _sampled(self, output: Output, step: Step) -> int:
        """One request's part of a step. Returns how many tokens it sampled."""
        if output.request.startswith(SCORE_PREFIX):
            if self._scoring is not None:
                self._scoring.take(output)
            return 0
        sequence = self._inside.get(output.request)
        if sequence is None:
            return 0
        version, count = self._number(step.version) if output.tokens else NO_VERSION, len(output.tokens)
        for token, logprob in zip(output.tokens, output.logprobs, strict=True):
            if not math.isfinite(logprob):
                raise FloatingPointError(f"the weights of version {version} give log-probabilities that are no numbers")
            if sequence.given_up:
                break
            if sequence.append(token, logprob, version):
                self._stop_string(sequence, bool(output.finish))
        if output.finish in _FINISH:
            self._inside.pop(sequence.name)
            self._feed.set()
            if not sequence.given_up:
                self._end(sequence, _FINISH[output.finish])
        elif output.finish == "error":
            raise ValueError(f"vLLM gave up request {sequence.request.id}")
        elif sequence.pending >= self._chunk_tokens:
            sequence.flush()
        return count

    def _stop_string(self, sequence: Sequence, ended: bool) -> None:
        self._end(sequence, FinishReason.STOP)
        sequence.given_up = True
        if not ended:
            self._give_up(sequence)

    def _gone(self, name: str) -> None:
        """vLLM has ended it because it was told to."""
        sequence = self._inside.pop(name, None)
        if sequence is None:
            return
        self._feed.set()
        if not sequence.given_up:
            self._end(sequence, sequence.wants or FinishReason.PAUSED)

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.flush(reason)
        if self._open.get(sequence.request.id) is sequence:
            del self._open[sequence.request.id]
        if sequence.kv:
            self._lineages.ended(sequence.request.episode, sequence.salt, sequence.kv_version, sequence.tokens, sequence.kv)

    # --- control ----------------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode, epoch: int) -> None:
        """A second pause of the same epoch only waits; one of a later epoch may turn FREEZE into ABORT."""
        self._check()
        if not self._pauses.counts(epoch):
            return
        if self._pauses.pause(mode, epoch):
            self._resting = self._spawn(self._come_to_rest(mode, self._resting))
        assert self._resting is not None
        await asyncio.wait([self._resting])
        self._check()

    async def _come_to_rest(self, mode: PauseMode, before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await asyncio.wait([before])
        if mode is PauseMode.ABORT:
            for sequence in list(self._open.values()):
                if sequence.name not in self._inside:
                    self._end(sequence, FinishReason.PAUSED)
        async with self._sending:
            await self._answer(self._core.pause(keep=mode is PauseMode.FREEZE))
        assert mode is not PauseMode.ABORT or not self._inside, "vLLM paused and did not end everything"
        self._silence.expect(False)
        for sequence in self._open.values():
            sequence.flush()

    async def resume(self, epoch: int) -> None:
        self._check()
        if not self._pauses.counts(epoch):
            return
        assert not self._controlled, "resumed while weights were being loaded or sequences scored"
        await self._answer(self._core.resume())
        self._pauses.resume(epoch)
        if self._version == NO_VERSION:
            for sequence in list(self._open.values()):
                sequence.out.fail(UserError(f"Request {sequence.request.id} {_TOO_EARLY}"))
        self._silence.expect(bool(self._inside))
        self._feed.set()

    def _begin_control(self, what: str) -> None:
        self._check()
        idle = self._pauses.paused and self._resting is not None and self._resting.done()
        assert idle and not self._controlled, f"{what} while the engine is paused"

    async def load(self, version: int, weights: StagedWeights) -> None:
        self._begin_control("weights are loaded")
        if version < 0 or version < self._version:
            raise ValueError(
                f"Weights of version {version} come after those of version {self._version}: version ids are never reused."
            )
        self._controlled = True
        began = now()
        try:
            fitted = await asyncio.to_thread(fit, self._model, weights)
            handover = await asyncio.to_thread(Handover, fitted)
            try:
                await self._answer(self._core.load(version, handover))
            except asyncio.CancelledError:
                self._die(f"loading version {version} ended half way")
                raise
            finally:
                handover.close()
        finally:
            self._controlled = False
        self._meter.load_seconds += now() - began
        if version != self._version:
            self._version = version
            self._lineages.loaded(version, {sequence.salt for sequence in self._inside.values()})

    async def score(self, tokens: list[int]) -> list[float]:
        self._begin_control("sequences are scored")
        if self._version == NO_VERSION:
            raise UserError(f"A sequence to score {_TOO_EARLY}")
        check_scored(tokens, self._score_tokens, self._vocabulary)
        self._controlled = True
        scoring = self._scoring = Scoring(tokens, f"{SCORE_PREFIX}{self._name}-{self._meter.scored_tokens}-{len(tokens)}")
        try:
            logprobs = await self._answer(scoring.run(self._core))
        finally:
            self._controlled = False
            self._scoring = None
            self._flush_aborts()
        self._meter.scored_tokens += len(tokens)
        return logprobs

    def _flush_aborts(self) -> None:
        names: Iterable[str] = self._late_aborts
        self._late_aborts = []
        if names and self._dead is None:
            self._spawn(self._abort(list(names)))
