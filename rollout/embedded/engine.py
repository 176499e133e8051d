"""The engine's asyncio front (`segue.ports.engine.Engine`).

consumes       requests, and the control calls of one owner (pause, load, resume)
produces       chunks into each request's outbox
waits for      one compute call at a time; nothing else
unblocked by   a request, a resume
on cancel      closing a request's iterator frees its slot and KV; the engine goes on

One task, `_serve`, plans and steps. Tensors are touched inside compute calls only, bookkeeping on the event loop only. Other
methods may run while a step is being computed: they end sequences, and mark the batch as changed, but slots are given out, moved
and overwritten by `_serve` alone, between steps. So nothing needs a lock.

What is counted how: a request of n tokens that gets a slot has a context of n − 1 positions to be filled, cached + prefilled.
Position n − 1 is fed by the decode step that samples the next token. So every decoded token costs one decoded position, and
prefill covers exactly what no decode step feeds.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from time import perf_counter
from typing import Any

from rollout.embedded.control import Control
from rollout.embedded.meter import Meter
from rollout.embedded.runner import DecodeBatch, Decoded, Runner
from rollout.embedded.sequence import Sequence
from rollout.embedded.slots import KEEP_STEPS, SlotPolicy
from rollout.embedded.support import open_runner, open_tokenizer
from rollout.embedded.watchdog import WatchedCompute
from rollout.pauses import Pauses
from rollout.requests import check_request, check_scored
from rollout.stops import StopStrings
from segue.clock import Compute, now
from segue.errors import UserError
from segue.ports.engine import Chunk, EngineCounts, EngineDead, FinishReason, GenerateRequest, PauseMode
from segue.ports.weights import ArrivingWeights, StagedWeights
from segue.trajectory import NO_VERSION

_TOO_EARLY = "came before any weights were loaded: load weights first."


class EmbeddedEngine:
    """See the module, and the port for what each method promises."""

    def __init__(
        self,
        model_path: str,
        *,
        slots: int,
        max_tokens: int,
        dtype: str,
        device: str,
        compute: Compute,
        tokenizer: Any = None,
        idle_slots: int = 0,
        decode_cost: float = 0.0,
        prefill_cost_per_token: float = 0.0,
        chunk_tokens: int = 16,
        admit_batch: int = 0,
        admit_steps: int = 4,
        keep_steps: float = KEEP_STEPS,
        step_seconds: float = 120.0,
    ) -> None:
        """
        slots            sequences decoded at once; each holds the KV of one episode of up to `max_tokens` tokens
        idle_slots       as many more episodes keep their KV while they wait
        dtype, device    torch's names ("float32", "cuda:0")
        compute          where blocking work runs; it stays its owner's to close
        tokenizer        for stop strings; None: the one in the model folder, if there is one
        decode_cost      logical seconds of a decode step, and of a prefilled token, where time is logical
        chunk_tokens     tokens are handed out this many at a time, and when a request ends or the engine pauses
        admit_batch      while others decode, requests are let in once so many wait (0: a quarter of the slots), or one has waited
        admit_steps      for `admit_steps` steps: each time costs a pass of its own
        keep_steps       decode steps for which an idle slot is kept for its episode, per token of its KV (see `slots`)
        step_seconds     the engine declares itself dead when one compute call takes longer than this
        """
        self._path = model_path
        self._max_tokens, self._dtype, self._device = max_tokens, dtype, device
        self._compute = compute
        self._watched = WatchedCompute(compute, step_seconds, self._late)
        self._tokenizer = tokenizer
        self._decode_cost, self._prefill_cost = decode_cost, prefill_cost_per_token
        self._chunk_tokens, self._admit_batch, self._admit_steps = chunk_tokens, admit_batch or max(1, slots // 4), admit_steps
        self._step_seconds = step_seconds

        self._runner: Runner | None = None
        self._stops: StopStrings | None = None
        self._policy = SlotPolicy(slots, idle_slots, keep_steps)
        self._open: dict[str, Sequence] = {}
        self._waiting: list[Sequence] = []
        self._batch: DecodeBatch | None = None  # None: who decodes has changed
        self._arrivals = 0
        self._steps_waited = 0
        self._version = NO_VERSION
        self._pauses = Pauses()
        self._ending: list[Sequence] = []
        self._server: asyncio.Task[None] | None = None
        self._wake = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._dead: EngineDead | None = None
        self._meter = Meter()
        self._control = Control(self._watched, self._meter, self._die)

    @property
    def version(self) -> int:
        return self._version

    @property
    def dead(self) -> bool:
        """Whether the engine is gone: every call raises `EngineDead`."""
        return self._dead is not None

    @property
    def stale_controls(self) -> int:
        """Pauses and resumes that came too late and were ignored."""
        return self._pauses.stale

    # --- life -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Open the model. Raises `UserError` if the folder holds none that this engine can run."""
        assert self._server is None, "started twice"

        def opened() -> tuple[Runner, StopStrings | None]:
            runner = open_runner(self._path, len(self._policy.slots), self._max_tokens, self._dtype, self._device)
            tokenizer = self._tokenizer if self._tokenizer is not None else open_tokenizer(self._path)
            return runner, None if tokenizer is None else StopStrings(tokenizer, runner.vocabulary)

        self._runner, self._stops = await self._compute.run(opened, 0.0)
        self._server = asyncio.get_running_loop().create_task(self._serve(), name="embedded-engine")

    async def stop(self) -> None:
        """End the engine; open requests raise `EngineDead`."""
        self._die(EngineDead("the engine was stopped"))
        if self._server is not None:
            self._server.cancel()
            await asyncio.wait([self._server])

    def _die(self, error: EngineDead) -> EngineDead:
        """The first cause counts. Returns what whoever caused it is to raise."""
        if self._dead is not None:
            return self._death()
        self._dead = error
        self._watched.rest()
        for sequence in self._open.values():
            sequence.out.fail(self._death())
        self._open.clear()
        self._waiting.clear()
        self._idle.set()  # whoever waits in `pause` finds the engine dead
        return self._death()

    def _death(self) -> EngineDead:
        """One exception for each who hears of it: a shared one would collect everybody's traceback."""
        error = EngineDead(str(self._dead))
        error.__cause__ = self._dead.__cause__ if self._dead is not None else None
        return error

    def _check(self) -> Runner:
        if self._dead is not None:
            raise self._death()
        if self._runner is None:
            raise RuntimeError("the engine was used before `start` had returned")
        return self._runner

    # --- requests ---------------------------------------------------------------------------------------------------

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """Chunks of one action. Raises `UserError` for a request that cannot be served and `EngineDead`."""
        sequence = self._submit(request)
        try:
            await self._queue(sequence)
            while True:
                chunk = await sequence.out.get()
                yield chunk
                if chunk.finish is not None:
                    return
        finally:
            self._release(sequence)

    def _submit(self, request: GenerateRequest) -> Sequence:
        """From here on the request is known: a pause ends it, whatever it still waits for."""
        runner = self._check()
        check_request(request, self._max_tokens, runner.vocabulary, self._stops is not None)
        if request.id in self._open:
            raise UserError(f"Request id {request.id} is already in use: give every request an id of its own.")
        if self._version == NO_VERSION and not self._pauses.paused:
            raise UserError(f"Request {request.id} {_TOO_EARLY}")
        self._arrivals += 1
        sequence = self._open[request.id] = Sequence(request, self._arrivals)
        return sequence

    async def _queue(self, sequence: Sequence) -> None:
        """Let it wait for a slot, once the vocabulary is sifted for its stop strings."""
        strings = sequence.request.stop_strings
        if strings:
            stops = self._stops
            assert stops is not None
            if stops.matcher(strings) is None:
                await self._compute.run(lambda: stops.prepare(strings), 0.0)
            sequence.stops_text = stops.matcher(strings)
        if self._open.get(sequence.request.id) is sequence:
            self._waiting.append(sequence)
            self._wake.set()

    def _release(self, sequence: Sequence) -> None:
        """The consumer is gone."""
        if self._open.get(sequence.request.id) is not sequence:
            return
        sequence.finished = FinishReason.ABORTED
        self._policy.drop(sequence)
        self._remove(sequence)

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.flush(reason)
        self._policy.park(sequence)
        self._remove(sequence)

    def _remove(self, sequence: Sequence) -> None:
        del self._open[sequence.request.id]
        self._batch = None
        if sequence in self._waiting:
            self._waiting.remove(sequence)

    async def abort(self, request_id: str) -> bool:
        self._check()
        sequence = self._open.get(request_id)
        if sequence is None:
            return False
        self._end(sequence, FinishReason.ABORTED)
        return True

    def forget(self, episode: int) -> None:
        self._policy.forget(episode)

    # --- control ----------------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode, epoch: int) -> None:
        """A second pause of the same epoch only waits; one of a later epoch may turn FREEZE into ABORT. The wait is as long as
        the step being computed (at most `step_seconds`)."""
        self._check()
        if not self._pauses.counts(epoch):
            return
        if self._pauses.pause(mode, epoch):
            if mode == PauseMode.ABORT:
                self._ending = list(self._open.values())
            self._idle.clear()
            self._wake.set()
        await self._idle.wait()
        self._check()

    async def resume(self, epoch: int) -> None:
        self._check()
        if not self._pauses.counts(epoch):
            return
        assert not self._control.busy, "resumed while weights were being loaded or sequences scored"
        self._pauses.resume(epoch)
        if self._version == NO_VERSION:
            for sequence in list(self._open.values()):
                sequence.out.fail(UserError(f"Request {sequence.request.id} {_TOO_EARLY}"))
        self._wake.set()

    def _controllable(self) -> Runner:
        runner = self._check()
        idle = self._pauses.paused and self._idle.is_set() and not self._control.busy
        assert idle, "weights are loaded and sequences scored while the engine is paused"
        return runner

    def _loadable(self, version: int) -> Runner:
        """Raises `ValueError` for a version that is not newer."""
        runner = self._controllable()
        if version < 0 or version < self._version:
            raise ValueError(
                f"Weights of version {version} come after those of version {self._version}: version ids are never reused."
            )
        return runner

    async def load(self, version: int, weights: StagedWeights) -> None:
        await self._control.load(self._loadable(version), version, weights)
        self._loaded(version)

    async def load_arriving(self, weights: ArrivingWeights) -> None:
        try:
            await self._control.load_arriving(self._loadable(weights.version), weights)
        finally:
            weights.close()
        self._loaded(weights.version)

    def _loaded(self, version: int) -> None:
        if version != self._version:
            self._version = version
            self._policy.loaded(kept=self._pauses.mode == PauseMode.FREEZE)

    async def score(self, tokens: list[int]) -> list[float]:
        runner = self._controllable()
        if self._version == NO_VERSION:
            raise UserError(f"A sequence to score {_TOO_EARLY}")
        check_scored(tokens, self._max_tokens, runner.vocabulary)
        return await self._control.score(runner, tokens, len(tokens) // 2 * self._prefill_cost + self._decode_cost)

    # --- stepping ---------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        try:
            while True:
                if self._pauses.paused or self._version == NO_VERSION or not (self._waiting or self._policy.busy):
                    self._settle()
                    await self._wake.wait()
                    continue
                self._idle.clear()
                if self._waiting and self._admission_due():
                    await self._admit()
                else:
                    await self._decode()
        except asyncio.CancelledError:
            if self._dead is None:
                self._die(EngineDead("the engine's task was cancelled"))
            raise
        except Exception as error:
            dead = EngineDead(f"the engine failed: {type(error).__name__}: {error}")
            dead.__cause__ = error
            self._die(dead)

    def _settle(self) -> None:
        """Nothing is being computed. If the engine was paused: hand out everything, and end what is to end."""
        self._watched.rest()
        if self._pauses.paused:
            for sequence in self._ending:
                if sequence.finished is None:
                    self._end(sequence, FinishReason.PAUSED)
            self._ending = []
            for sequence in self._open.values():
                sequence.flush()
        self._wake.clear()
        self._idle.set()

    def _admission_due(self) -> bool:
        if not self._policy.busy:
            return True
        if not self._policy.can_place(self._waiting):
            return False
        self._steps_waited += 1
        return len(self._waiting) >= self._admit_batch or self._steps_waited >= self._admit_steps

    async def _admit(self) -> None:
        runner, began = self._check(), perf_counter()
        self._steps_waited = 0
        plan = self._policy.admit(self._waiting, self._version)
        assert plan.placements
        for displaced in plan.displaced:  # it may come back on KV of another version, and a chunk has one
            displaced.flush()
        placed = {id(p.sequence) for p in plan.placements}
        self._waiting = [s for s in self._waiting if id(s) not in placed] + plan.displaced
        self._batch = None
        prefilled = sum(len(p.sequence.tokens) - 1 - p.cached for p in plan.placements)
        self._meter.prefill_tokens += prefilled
        self._meter.cached_tokens += sum(p.cached for p in plan.placements)
        if prefilled or any(p.source != p.slot.row for p in plan.placements):
            started, planned = now(), perf_counter()
            self._meter.spent("book", planned - began)

            def admit() -> float:
                entered = perf_counter()
                runner.admit(plan.placements)
                return perf_counter() - entered

            computing = await self._watched.run(admit, prefilled * self._prefill_cost)
            self._meter.prefill_seconds += now() - started
            self._meter.spent("prefill", computing)
            self._meter.spent("hand_over", perf_counter() - planned - computing)

    async def _decode(self) -> None:
        runner, batch, began = self._check(), self._batch, perf_counter()
        moves: list[tuple[int, int, int]] = []
        if batch is None:
            moves = self._policy.compact()
            batch = self._batch = runner.batch(self._policy.rows())
        noise = batch.uniform()
        started, ready = now(), perf_counter()

        def step() -> Decoded:
            if moves:
                runner.move(moves)
            result: Decoded = runner.decode(batch, noise)
            return result

        done = await self._watched.run(step, self._decode_cost)
        back = perf_counter()
        self._meter.decode_seconds += now() - started
        self._deliver(batch, done)
        self._meter.spent("forward", done.forward_seconds)
        self._meter.spent("sample", done.sample_seconds)
        self._meter.spent("hand_over", back - ready - done.forward_seconds - done.sample_seconds)
        self._meter.spent("book", ready - began + perf_counter() - back)

    def _deliver(self, batch: DecodeBatch, done: Decoded) -> None:
        """A step's tokens go to their sequences."""
        version = done.version
        self._policy.stepped()
        for sequence, token, logprob in zip(batch.rows, done.tokens, done.logprobs, strict=True):
            if sequence is None or sequence.finished is not None:
                continue
            if not math.isfinite(logprob):
                raise FloatingPointError(f"the weights of version {version} give log-probabilities that are no numbers")
            self._meter.decode_tokens += 1
            reason = sequence.append(token, logprob, version)
            if reason is not None:
                self._end(sequence, reason)
            elif sequence.pending >= self._chunk_tokens:
                sequence.flush()

    def _late(self) -> None:
        self._die(EngineDead(f"a compute call took longer than {self._step_seconds:g} s"))
        if self._server is not None:
            self._server.cancel()

    def counts(self) -> EngineCounts:
        return self._meter.counts(self._policy, len(self._waiting))
