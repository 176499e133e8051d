"""The modelled engine: `segue.ports.engine.Engine` with a cost model in place of a model.

consumes       requests, pauses, loads
produces       one chunk per turn or interruption
waits for      the next event of the batch (a request's last token, a full KV cache), on one timer
unblocked by   the timer, a request, a pause
on cancel      a request whose iterator is closed leaves the batch and keeps nothing

How long a turn is follows from the episode's sampling seed (`workload`); how long it takes, from the batch (`batching`).
"""

from __future__ import annotations

import asyncio
import bisect
import heapq
from collections.abc import AsyncIterator
from typing import Any

from benchmarks.virtual.batching import Batch
from benchmarks.virtual.kv import KvCache
from benchmarks.virtual.scenario import EngineModel
from benchmarks.virtual.tokenizer import END_TOKEN, FILLER
from benchmarks.virtual.workload import Workload
from rollout.outbound import Outbox
from segue.clock import now
from segue.ports.engine import Admission, Chunk, EngineCounts, FinishReason, GenerateRequest, PauseMode
from segue.trajectory import NO_VERSION

LOGPROB = -1.0
"""Of every modelled token, in nats."""
_WATERMARK = 0.01
"""Share of the KV cache that must be free beside what an admission takes, so that it is not the next to be preempted."""


class Sequence:
    """One request: `target` tokens to sample, `done` of them before the last admission; running from step `began` to `ends`."""

    __slots__ = (
        "admissions",
        "arrival",
        "began",
        "context",
        "done",
        "ends",
        "finish",
        "given",
        "out",
        "request",
        "running",
        "spans",
        "target",
    )

    def __init__(self, request: GenerateRequest, target: int, finish: FinishReason, arrival: int) -> None:
        self.request = request
        self.context = len(request.tokens)
        self.target = target
        self.finish = finish
        self.arrival = arrival
        self.done = 0
        self.given = 0
        self.running = False
        self.began = 0.0
        self.ends = 0.0
        self.admissions: list[Admission] = []
        self.spans: list[tuple[int, int]] = []
        self.out = Outbox()

    @property
    def order(self) -> tuple[int, int]:
        """Who goes first: the smaller."""
        return self.request.priority, self.arrival


class _Answer:
    """The chunk of one request, as an iterator. (An async generator would do, at several times the cost.)"""

    __slots__ = ("_engine", "_request")

    def __init__(self, engine: ModelledEngine, request: GenerateRequest) -> None:
        self._engine = engine
        self._request: GenerateRequest | None = request

    def __aiter__(self) -> _Answer:
        return self

    async def __anext__(self) -> Chunk:
        request, self._request = self._request, None
        if request is None:
            raise StopAsyncIteration
        sequence = self._engine.submit(request)
        try:
            return await sequence.out.get()
        finally:
            self._engine.withdraw(sequence)


class ModelledEngine:
    """See the module. `slots` requests at most decode at once; lengths are in units of `unit` tokens."""

    def __init__(self, model: EngineModel, workload: Workload, slots: int, unit: int) -> None:
        self._model = model
        self._workload = workload
        self._slots = slots
        self._capacity = model.kv_tokens // unit
        self._watermark = self._capacity * _WATERMARK
        self._kv = KvCache(max(1, round(model.block_tokens / unit)))
        self._unit = unit
        self._version = NO_VERSION
        self._batch: Batch
        self._running: dict[str, Sequence] = {}
        self._ends: list[tuple[float, int, Sequence]] = []
        self._waiting: list[tuple[int, int, Sequence]] = []
        self._known: dict[str, Sequence] = {}
        self._turns: dict[int, list[int]] = {}
        self._arrivals = 0
        self._epoch = -1
        self._paused = False
        self._frozen = False
        self._timer: asyncio.TimerHandle | None = None
        self._pumping = False
        self._prefill_tokens = 0
        self._cached_tokens = 0
        self._decode_tokens = 0
        self._scored_tokens = 0
        self._control_seconds = 0.0
        self._preemptions = 0

    @property
    def version(self) -> int:
        return self._version

    async def start(self) -> None:
        self._batch = Batch(self._model, self._unit, now())

    async def stop(self) -> None:
        self._paused = True
        self._disarm()

    # --- requests ---------------------------------------------------------------------------------------------------------------

    def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        """See the port: one chunk, with its finish."""
        return _Answer(self, request)

    def submit(self, request: GenerateRequest) -> Sequence:
        """A request begins to wait."""
        target, finish = self._target(request)
        self._arrivals += 1
        sequence = Sequence(request, target, finish, self._arrivals)
        self._known[request.id] = sequence
        heapq.heappush(self._waiting, (request.priority, sequence.arrival, sequence))
        self._pump_soon()
        return sequence

    def withdraw(self, sequence: Sequence) -> None:
        """Nobody reads its answer any more."""
        if self._known.get(sequence.request.id) is sequence:
            self._advance()
            self._leave(sequence)
            self._pump_soon()

    async def abort(self, request_id: str) -> bool:
        sequence = self._known.get(request_id)
        if sequence is None:
            return False
        self._advance()
        self._end(sequence, FinishReason.ABORTED)
        self._pump_soon()
        return True

    def forget(self, episode: int) -> None:
        self._kv.forget(episode)
        self._turns.pop(episode, None)

    def _target(self, request: GenerateRequest) -> tuple[int, FinishReason]:
        """Tokens to sample, and why they end: the rest of the turn that begins or goes on behind `request.offset`."""
        ends = self._turns.setdefault(request.episode, [])
        while not ends or ends[-1] <= request.offset:
            length = self._workload.action_tokens(request.group, request.seed, len(ends))
            ends.append((ends[-1] if ends else 0) + length)
        rest = ends[bisect.bisect_right(ends, request.offset)] - request.offset
        return (rest, FinishReason.STOP) if rest <= request.max_tokens else (request.max_tokens, FinishReason.LENGTH)

    # --- updates ----------------------------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode, epoch: int) -> None:
        """See the port. The step under way is given up: its tokens were not sampled."""
        if epoch <= self._epoch:
            return
        self._epoch = epoch
        self._advance()
        self._paused = True
        self._disarm()
        self._frozen = mode is PauseMode.FREEZE
        if not self._frozen:
            for sequence in list(self._known.values()):
                self._end(sequence, FinishReason.PAUSED)

    async def load(self, version: int, weights: Any) -> None:
        """See the port. Without frozen requests nobody will ask for the old versions' KV."""
        assert self._paused, "weights are swapped while the engine is paused"
        await self._control(self._model.swap_seconds)
        for sequence in self._running.values():
            self._mark(sequence)
        self._version = version
        if not self._frozen:
            self._kv.clear("weight_update")

    async def score(self, tokens: list[int]) -> list[float]:
        """See the port: every token has the log-probability of all modelled ones."""
        assert self._paused, "a sequence is scored while the engine is paused"
        self._scored_tokens += len(tokens)
        await self._control(self._batch.prefill_cost(len(tokens)))
        return [LOGPROB] * (len(tokens) - 1)

    async def resume(self, epoch: int) -> None:
        if epoch < self._epoch or not self._paused:
            return
        self._batch.skip(now())
        self._paused = False
        self._frozen = False
        self._pump_soon()

    async def _control(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self._control_seconds += seconds

    # --- the batch --------------------------------------------------------------------------------------------------------------

    def _pump_soon(self) -> None:
        """Admit, and look when the next event is, once for all that happens at this moment."""
        if not self._pumping and not self._paused:
            self._pumping = True
            asyncio.get_running_loop().call_soon(self._pump)

    def _pump(self) -> None:
        self._pumping = False
        if self._paused:
            return
        self._advance()
        self._admit()
        self._arm()

    def _advance(self) -> None:
        """Let the batch go on until now, and end what is complete."""
        if self._paused:
            return
        batch, ends = self._batch, self._ends
        batch.advance(now())
        while ends and (ends[0][2].ends != ends[0][0] or batch.reached(ends[0][0])):
            step, _, sequence = heapq.heappop(ends)
            if sequence.running and sequence.ends == step:
                self._end(sequence, sequence.finish)

    def _admit(self) -> None:
        """Let waiting requests begin, first come by priority, as far as slots and KV reach."""
        while self._waiting and len(self._running) < self._slots:
            sequence = self._waiting[0][2]
            if self._known.get(sequence.request.id) is sequence and not sequence.running:
                if not self._make_room(sequence):
                    return
                self._begin(sequence)
            heapq.heappop(self._waiting)

    def _make_room(self, sequence: Sequence) -> bool:
        """Evict idle KV until the request fits. False if even then it does not."""
        kv, batch, episode = self._kv, self._batch, sequence.request.episode
        need = sequence.context + sequence.done
        spare = self._watermark if self._running else 0.0
        while batch.tokens + kv.idle - kv.held(episode) + need + spare > self._capacity:
            if not kv.evict(but=episode):
                return not self._running  # alone it always fits: the scenario was checked
        return True

    def _begin(self, sequence: Sequence) -> None:
        request, kv, batch = sequence.request, self._kv, self._batch
        context = sequence.context + sequence.done - 1  # the newest token is fed to sample the next one
        cached, block = kv.find(request.episode, request.group, request.lineage, context)
        prompt = context if request.offset == 0 and not sequence.done else None
        lost = kv.take(request.episode, request.group, request.lineage, prompt)
        prefilled = context - cached
        sequence.admissions.append(Admission(context, cached, prefilled, lost, block))
        self._prefill_tokens += prefilled
        self._cached_tokens += cached
        batch.join(context + 1, prefilled)
        sequence.running = True
        sequence.began = batch.steps
        sequence.ends = batch.steps + (sequence.target - sequence.done)
        self._running[request.id] = sequence
        heapq.heappush(self._ends, (sequence.ends, sequence.arrival, sequence))

    def _arm(self) -> None:
        """One timer, for what ends first or for the moment the KV cache is full."""
        self._disarm()
        ends = self._ends
        while ends and not (ends[0][2].running and ends[0][2].ends == ends[0][0]):
            heapq.heappop(ends)
        if not ends:
            return
        batch = self._batch
        full = batch.steps + max(0.0, self._capacity - self._kv.idle - batch.tokens) / batch.requests
        step = ends[0][0]
        due = self._due
        if full < step - 1e-6:
            step, due = full, self._full
        loop = asyncio.get_running_loop()
        self._timer = loop.call_at(loop.time() + batch.seconds_to(step), due)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _due(self) -> None:
        self._timer = None
        if self._ends:
            self._batch.advance(now())
            # A clock has a finite resolution: without this it might come again and again for less than that.
            self._batch.steps = max(self._batch.steps, self._ends[0][0])
        self._pump()

    def _full(self) -> None:
        """No token fits any more: the idle KV used longest ago goes, else the request that would be admitted last."""
        self._timer = None
        self._advance()
        if not self._kv.evict() and len(self._running) > 1:
            last = max(self._running.values(), key=lambda sequence: sequence.order)
            self._preempt(last)
        self._pump()

    def _preempt(self, sequence: Sequence) -> None:
        self._stop(sequence)
        self._preemptions += 1
        self._kv.lose(sequence.request.episode, sequence.request.group, "preemption")
        heapq.heappush(self._waiting, (sequence.request.priority, sequence.arrival, sequence))

    # --- ends -------------------------------------------------------------------------------------------------------------------

    def _mark(self, sequence: Sequence) -> None:
        """Stamp what was sampled since the last stamp with the version that sampled it."""
        if sequence.running:
            sampled = sequence.done + self._batch.since(sequence.began)
        else:
            sampled = sequence.done
        fresh = sampled - sequence.given
        if fresh > 0:
            sequence.spans.append((self._version, fresh))
            sequence.given = sampled

    def _stop(self, sequence: Sequence) -> int:
        """Take a request out of the batch. Returns how many tokens of KV it had."""
        self._mark(sequence)
        had = sequence.context + self._batch.steps - sequence.began + sequence.done
        self._batch.leave(had)
        sequence.done = sequence.given
        sequence.running = False
        del self._running[sequence.request.id]
        return int(had)

    def _end(self, sequence: Sequence, finish: FinishReason) -> None:
        """Hand out everything, and keep the KV for the episode's next request."""
        request, kv = sequence.request, self._kv
        if sequence.running:
            if finish is sequence.finish:
                self._complete(sequence)
            self._stop(sequence)
            kv.keep(request.episode, request.group, request.lineage, sequence.context + sequence.done - 1)
        del self._known[request.id]
        n = sequence.done
        tokens = [FILLER] * n
        if finish is FinishReason.STOP:
            tokens[-1] = END_TOKEN
        self._decode_tokens += n
        sequence.out.put(Chunk(tokens, [LOGPROB] * n, sequence.spans, request.lineage, sequence.admissions, finish))

    def _complete(self, sequence: Sequence) -> None:
        """All of its tokens are sampled, whatever rounding says."""
        fresh = sequence.target - sequence.given
        if fresh:
            sequence.spans.append((self._version, fresh))
            sequence.given = sequence.target

    def _leave(self, sequence: Sequence) -> None:
        """Nobody wants the request any more."""
        del self._known[sequence.request.id]
        if sequence.running:
            self._stop(sequence)
            self._kv.lose(sequence.request.episode, sequence.request.group, "")

    def counts(self) -> EngineCounts:
        batch = getattr(self, "_batch", None)
        prefill, decode = (batch.prefill_seconds, batch.decode_seconds) if batch is not None else (0.0, 0.0)
        return EngineCounts(
            prefill_tokens=self._prefill_tokens,
            cached_tokens=self._cached_tokens,
            decode_tokens=self._decode_tokens,
            prefill_seconds=prefill,
            decode_seconds=decode,
            busy_seconds=prefill + decode + self._control_seconds,
            running=len(self._running),
            waiting=len(self._known) - len(self._running),
            preemptions=self._preemptions,
            evictions=self._kv.evictions,
            scored_tokens=self._scored_tokens,
        )
