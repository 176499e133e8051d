"""The requests of an engine: held back, given to vLLM, fed by its steps, ended.

Requests are held back here while the engine is paused, and beyond what vLLM runs at once (and a few ahead, so that it always has
the next one at hand). What vLLM has been given it runs by priority.

A request that is told to end (`abort`, a pause) has ended when vLLM's scheduler says so: everything it had sampled until then
came before. Only a consumer that is gone, or a stop string, leaves tokens behind: vLLM may have sampled a few more by then.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
import math
from collections.abc import Callable, Iterable, Iterator

from rollout.stops import StopStrings
from rollout.vllm.core import LENGTH, STOP, Core, Output, Step, arrival_time, sampling
from rollout.vllm.life import Life
from rollout.vllm.lineage import Lineages
from rollout.vllm.record import Admitted
from rollout.vllm.sequence import Sequence
from segue.errors import UserError
from segue.ports.engine import EngineDead, FinishReason, GenerateRequest
from segue.trajectory import NO_VERSION

_FINISH = {STOP: FinishReason.STOP, LENGTH: FinishReason.LENGTH}


class Requests:
    """See the module.

    name          of the engine: the names of its requests begin with it
    limit         so many are given to vLLM at a time
    chunk_tokens  tokens are handed out this many at a time, and when a request ends or the engine pauses
    vocabulary    ids of the model
    stops         for stop strings; None: there are none
    paused        whether the engine is paused now
    """

    def __init__(
        self,
        core: Core,
        life: Life,
        *,
        name: str,
        limit: int,
        chunk_tokens: int,
        vocabulary: int,
        stops: StopStrings | None,
        paused: Callable[[], bool],
    ) -> None:
        self._core, self._life = core, life
        self._name, self._limit, self._chunk_tokens, self._vocabulary = name, limit, chunk_tokens, vocabulary
        self._stops = stops
        self._paused = paused
        self.lineages = Lineages(name, 1)
        self._open: dict[str, Sequence] = {}
        self._held: list[tuple[tuple[int, int], Sequence]] = []  # a heap
        self._inside: dict[str, Sequence] = {}
        self._arrivals = itertools.count()
        self._feed = asyncio.Event()
        self._late_aborts: list[str] = []
        self._aborts_wait = False
        self.sending = asyncio.Lock()
        """Held by whoever gives vLLM something that must not overtake, or be overtaken by, a request."""
        self.discarded = 0
        """Tokens that vLLM sampled beyond a stop string or for a consumer that was gone."""
        self.unclaimed = 0
        """Tokens that vLLM prefilled for requests that nobody waited for any more, when it did not know that yet."""

    # --- how things stand -------------------------------------------------------------------------------------------

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def __iter__(self) -> Iterator[Sequence]:
        return iter(list(self._open.values()))

    @property
    def running(self) -> int:
        """Those with a slot."""
        return sum(sequence.running for sequence in self._open.values())

    @property
    def waiting(self) -> int:
        """Those without one."""
        return len(self._open) - self.running

    @property
    def inside(self) -> bool:
        """Whether vLLM has any."""
        return bool(self._inside)

    @property
    def salts(self) -> set[str]:
        """Of those that vLLM has."""
        return {sequence.salt for sequence in self._inside.values()}

    # --- in ---------------------------------------------------------------------------------------------------------

    def open(self, request: GenerateRequest) -> Sequence:
        """From here on the request is known: a pause ends it, whatever it still waits for."""
        sequence = self._open[request.id] = Sequence(request, next(self._arrivals))
        return sequence

    async def hold(self, sequence: Sequence) -> None:
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

    def wake(self) -> None:
        """There may be room, or the engine goes on."""
        self._feed.set()

    async def feed(self) -> None:
        """Give vLLM what it has room for, the first in order first; ends with the engine."""
        while not self._life.dead:
            while self._held and not self._paused() and len(self._inside) < self._limit:
                _, sequence = heapq.heappop(self._held)
                if self._open.get(sequence.request.id) is sequence:
                    await self._give(sequence)
            self._feed.clear()
            await self._feed.wait()

    async def _give(self, sequence: Sequence) -> None:
        request = sequence.request
        sequence.name = f"{self._name}-{sequence.arrival}-{request.id}"
        sequence.salt = self.lineages.salt(request)
        self._inside[sequence.name] = sequence
        self._life.silence.expect(True)
        params = sampling(
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            stop_tokens=[token for token in request.stop_tokens if 0 <= token < self._vocabulary],
            extra={"seed": request.seed, "offset": request.offset},
        )
        async with self.sending:
            submission = self._core.submit(
                sequence.name,
                request.tokens,
                params,
                salt=sequence.salt,
                priority=request.priority,
                arrival=arrival_time(),
            )
            await self._life.answer(submission)

    # --- out --------------------------------------------------------------------------------------------------------

    def release(self, sequence: Sequence) -> None:
        """The consumer is gone."""
        self.discarded += sequence.unread
        if self._open.get(sequence.request.id) is sequence:
            del self._open[sequence.request.id]
            self._give_up(sequence)

    def _give_up(self, sequence: Sequence) -> None:
        """Whatever vLLM still samples for it is nobody's."""
        sequence.given_up = True
        if sequence.name in self._inside and not self._life.dead:
            self._tell_to_end([sequence.name])

    def abort(self, request_id: str) -> bool:
        """End a request with all tokens so far. False if it is not known."""
        sequence = self._open.get(request_id)
        if sequence is None:
            return False
        if sequence.name not in self._inside:
            self._end(sequence, FinishReason.ABORTED)
        elif sequence.wants is None:
            sequence.wants = FinishReason.ABORTED
            self._tell_to_end([sequence.name])
        return True

    def hold_aborts(self) -> None:
        """What is frozen must not be touched now: aborts wait for `let_aborts`."""
        self._aborts_wait = True

    def let_aborts(self) -> None:
        """The inverse of `hold_aborts`."""
        self._aborts_wait = False
        names, self._late_aborts = self._late_aborts, []
        if names and not self._life.dead:
            self._life.spawn(self._abort(names))

    def _tell_to_end(self, names: list[str]) -> None:
        if self._aborts_wait:
            self._late_aborts += names
        else:
            self._life.spawn(self._abort(names))

    async def _abort(self, names: list[str]) -> None:
        async with self.sending:  # vLLM forgets an abort of what it does not know yet
            await self._life.answer(self._core.abort(names))

    def end_held(self) -> None:
        """End all that vLLM does not have: the engine pauses."""
        for sequence in self:
            if sequence.name not in self._inside:
                self._end(sequence, FinishReason.PAUSED)

    def refuse_all(self, sentence: str) -> None:
        """None of them can be served; `sentence` goes on from "Request ID"."""
        for sequence in self:
            sequence.out.fail(UserError(f"Request {sequence.request.id} {sentence}"))

    def flush(self) -> None:
        """Hand out everything that was sampled."""
        for sequence in self._open.values():
            sequence.flush()

    def fail(self, why: str) -> None:
        """The engine is dead."""
        for sequence in self._open.values():
            sequence.out.fail(EngineDead(why))
        self._open.clear()
        self._held.clear()

    # --- vLLM's steps -----------------------------------------------------------------------------------------------

    def admitted(self, admitted: Admitted, version: str) -> None:
        """One of them got a slot and its context is there."""
        sequence = self._inside.get(admitted.request)
        if sequence is None or sequence.given_up:
            self.unclaimed += admitted.prefilled
            return
        note = self.lineages.again if admitted.again else self.lineages.first
        tokens = sequence.tokens
        sequence.admitted(note(sequence.request, sequence.salt, tokens, admitted.cached, admitted.prefilled, _number(version)))

    def sampled(self, output: Output, step: Step) -> int:
        """One request's part of a step. Returns how many tokens it sampled.

        Raises `ValueError` and `FloatingPointError` for what must not be.
        """
        sequence = self._inside.get(output.request)
        if sequence is None:
            return 0
        version, count = _number(step.version) if output.tokens else NO_VERSION, len(output.tokens)
        for token, logprob in zip(output.tokens, output.logprobs, strict=True):
            if not math.isfinite(logprob):
                raise FloatingPointError(f"the weights of version {version} give log-probabilities that are no numbers")
            if sequence.given_up:
                self.discarded += 1
            elif sequence.append(token, logprob, version):
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

    def gone(self, names: Iterable[str]) -> None:
        """vLLM has ended these because it was told to."""
        for name in names:
            sequence = self._inside.pop(name, None)
            if sequence is None:
                continue
            self._feed.set()
            if not sequence.given_up:
                self._end(sequence, sequence.wants or FinishReason.PAUSED)

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        sequence.flush(reason)
        if self._open.get(sequence.request.id) is sequence:
            del self._open[sequence.request.id]
        if sequence.kv:
            self.lineages.ended(sequence.request.episode, sequence.salt, sequence.kv_version, sequence.tokens, sequence.kv)


def _number(version: str) -> int:
    if not version.isdecimal():
        raise ValueError(f"vLLM says that it sampled under weights of version {version!r}")
    return int(version)
