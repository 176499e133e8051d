"""An engine without a model that keeps to the engine's port: it counts prefill, stamps versions, pauses and loads."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any

from segue.ports.engine import Admission, Chunk, EngineCounts, EngineDead, FinishReason, GenerateRequest, PauseMode
from segue.ports.transfer import Transfer
from segue.trajectory import NO_VERSION

Policy = Callable[[GenerateRequest, int], int]
"""(request, index of the token within the episode) → token id."""


class Words:
    """A policy of random words that closes a turn every few tokens: a function of (seed, index) alone, as a seeded sampler is."""

    def __init__(self, words: list[int], close: int, mean_length: int = 6) -> None:
        self._words, self._close, self._mean = words, close, mean_length

    def __call__(self, request: GenerateRequest, index: int) -> int:
        digest = hashlib.blake2b(f"{request.seed}.{index}".encode(), digest_size=8).digest()
        number = int.from_bytes(digest, "little")
        return self._close if number % self._mean == 0 else self._words[number // self._mean % len(self._words)]


class _Live:
    def __init__(self, request: GenerateRequest) -> None:
        self.request = request
        self.tokens = list(request.tokens)
        self.out: asyncio.Queue[Chunk | Exception] = asyncio.Queue()
        self.new: list[int] = []
        self.versions: list[int] = []
        self.admissions: list[Admission] = []
        self.admitted = False
        self.kv_version = request.lineage
        self.sampled = 0


class FakeEngine:
    """One token per request and step of `step` seconds, at most `slots` requests at a time, KV per episode."""

    def __init__(self, policy: Policy, text: Callable[[list[int]], str], *, step: float = 0.01, slots: int = 64, chunk: int = 3):
        self.policy, self._text, self._step, self._slots, self._chunk = policy, text, step, slots, chunk
        self.version = NO_VERSION
        self.requests: list[GenerateRequest] = []
        self.control: list[str] = []
        self.dead: Exception | None = None
        self.deaf_to_aborts = False
        self.fail_load: Exception | None = None
        self.load_seconds = 0.02
        self.score_seconds = 0.0
        self.forgets_to_load = False
        self.scored: list[int] = []
        self.arrived_while_paused = 0
        self._open: dict[str, _Live] = {}
        self._kv: dict[int, tuple[list[int], int]] = {}
        self._lost: dict[int, str] = {}
        self._paused = False
        self._epoch = 0
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self.prefill = self.cached = self.decoded = self.preemptions = self.evictions = 0

    async def start(self) -> None:
        self._task = asyncio.get_running_loop().create_task(self._serve(), name="fake-engine")

    async def stop(self) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.wait([self._task])

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        if self.dead is not None:
            raise self.dead
        assert request.id not in self._open and request.max_tokens >= 1 and request.tokens
        assert all(other.request.episode != request.episode for other in self._open.values()), "one request per episode at a time"
        self.requests.append(request)
        self.arrived_while_paused += self._paused
        live = self._open[request.id] = _Live(request)
        self._wake.set()
        try:
            while True:
                chunk = await live.out.get()
                if isinstance(chunk, Exception):
                    raise chunk
                yield chunk
                if chunk.finish is not None:
                    return
        finally:
            self._open.pop(request.id, None)

    async def abort(self, request_id: str) -> bool:
        live = self._open.get(request_id)
        if live is None or self.deaf_to_aborts:
            return False
        assert not self._paused, "aborted while paused"
        self._end(live, FinishReason.ABORTED)
        return True

    async def pause(self, mode: PauseMode, epoch: int) -> None:
        self.control.append(f"pause {mode}")
        assert epoch > self._epoch and not self._paused
        self._epoch, self._paused = epoch, True
        for live in list(self._open.values()):
            if mode is PauseMode.ABORT:
                self._end(live, FinishReason.PAUSED)
            else:
                self._flush(live)

    async def load(self, version: int, weights: Any) -> None:
        assert self._paused, "loaded while running"
        self.control.append(f"load {version}")
        await asyncio.sleep(self.load_seconds)
        if self.fail_load is not None:
            raise self.fail_load
        self.version = version

    async def load_arriving(self, weights: Any) -> None:
        """One bucket after the other; what is in it after a failure is a mixture."""
        assert self._paused, "loaded while running"
        if isinstance(self.fail_load, ValueError):
            raise self.fail_load
        async for number in weights.buckets():
            await asyncio.sleep(self.load_seconds)
            self.control.append(f"bucket {number} of {weights.version}")
            if self.fail_load is not None:
                raise EngineDead(str(self.fail_load))
            weights.in_it = number + 1
        self.version = weights.version

    async def score(self, tokens: list[int]) -> list[float]:
        assert self._paused and self.version != NO_VERSION, "scored while running"
        self.scored.append(self.version)
        await asyncio.sleep(self.score_seconds)
        return probed(self.version - self.forgets_to_load, tokens)

    async def resume(self, epoch: int) -> None:
        self.control.append("resume")
        assert epoch == self._epoch and self._paused
        self._paused = False
        self._wake.set()

    def forget(self, episode: int) -> None:
        self._kv.pop(episode, None)
        self._lost.pop(episode, None)

    def evict(self, episode: int) -> None:
        """Somebody else needed the slot."""
        if self._kv.pop(episode, None) is not None:
            self._lost[episode] = "eviction"
            self.evictions += 1

    def preempt(self, episode: int) -> None:
        """A running request loses its slot and gets it back at the next step."""
        for live in self._open.values():
            if live.request.episode == episode and live.admitted:
                live.admitted = False
                self._kv.pop(episode, None)
                self._lost[episode] = "preemption"
                self.preemptions += 1

    def die(self, error: EngineDead) -> None:
        self.dead = error
        for live in self._open.values():
            live.out.put_nowait(error)

    def counts(self) -> EngineCounts:
        running = sum(live.admitted for live in self._open.values())
        waiting = len(self._open) - running
        seconds = self.prefill * 0.001
        return EngineCounts(
            self.prefill, self.cached, self.decoded, seconds, 0.0, seconds, running, waiting, self.preemptions, self.evictions
        )

    async def _serve(self) -> None:
        while True:
            if self._paused or not self._open or self.version == NO_VERSION:
                self._wake.clear()
                await self._wake.wait()
                continue
            await asyncio.sleep(self._step)
            if not self._paused:
                for live in sorted(self._open.values(), key=lambda entry: entry.request.priority)[: self._slots]:
                    self._advance(live)

    def _advance(self, live: _Live) -> None:
        request = live.request
        if not live.admitted:
            self._admit(live)
        token = self.policy(request, request.offset + live.sampled)
        live.sampled += 1
        live.new.append(token)
        live.versions.append(self.version)
        live.tokens.append(token)
        self._kv[request.episode] = (live.tokens[:-1], live.kv_version)
        self.decoded += 1
        text = self._text(live.tokens[len(request.tokens) :])
        if token in request.stop_tokens or any(text.endswith(s) for s in request.stop_strings):
            self._end(live, FinishReason.STOP)
        elif live.sampled >= request.max_tokens:
            self._end(live, FinishReason.LENGTH)
        elif len(live.new) >= self._chunk:
            self._flush(live)

    def _admit(self, live: _Live) -> None:
        context, episode = len(live.tokens) - 1, live.request.episode
        kept, version = self._kv.get(episode, ([], live.request.lineage))
        lost = self._lost.pop(episode, "")
        if kept and version != live.request.lineage:
            kept, lost = [], "weight_update"
        cached = next(
            (i for i, (a, b) in enumerate(zip(kept, live.tokens, strict=False)) if a != b), min(len(kept), len(live.tokens))
        )
        cached = min(cached, context)
        live.kv_version = live.request.lineage if cached else self.version
        live.admissions.append(Admission(context, cached, context - cached, lost))
        self.prefill += context - cached
        self.cached += cached
        live.admitted = True

    def _flush(self, live: _Live, finish: FinishReason | None = None) -> None:
        if not live.new and not live.admissions and finish is None:
            return
        spans: list[tuple[int, int]] = []
        for version in live.versions:
            if spans and spans[-1][0] == version:
                spans[-1] = (version, spans[-1][1] + 1)
            else:
                spans.append((version, 1))
        logprobs = [logprob(token) for token in live.new]
        live.out.put_nowait(Chunk(live.new, logprobs, spans, live.kv_version, live.admissions, finish))
        live.new, live.versions, live.admissions = [], [], []

    def _end(self, live: _Live, finish: FinishReason) -> None:
        self._flush(live, finish)
        self._open.pop(live.request.id, None)


def logprob(token: int) -> float:
    """The made-up log-probability of a token: a function of it, so that a mix-up shows."""
    return -0.5 - token / 1024


def probed(version: int, tokens: list[int]) -> list[float]:
    """What the weights of a version make of a probe, exactly."""
    return [logprob(token) - version for token in tokens[1:]]


class Staged:
    """Weights that arrived; nothing looks into them here. `gap` nats are what the learner is off at the probe's last token."""

    def __init__(self, version: int, gap: float | None = 0.0) -> None:
        self.version = version
        self.manifest = SimpleNamespace(probe=None)
        if gap is not None:
            tokens = [7, 1, 5, 40]
            *most, last = probed(version, tokens)
            self.manifest.probe = SimpleNamespace(tokens=tokens, logprobs=[*most, last + gap])

    def tensors(self) -> dict[str, Any]:
        return {}


class Arriving:
    """Buckets that come one by one, `seconds` in all; `error` comes in the place of bucket number `fails_at`."""

    def __init__(self, staged: Staged, seconds: float, error: Exception | None, fails_at: int) -> None:
        self.version, self.manifest = staged.version, staged.manifest
        self.in_it = 0
        self.closed = False
        self._seconds, self._error, self._fails_at = seconds, error, fails_at

    async def buckets(self) -> AsyncIterator[int]:
        for number in range(4):
            await asyncio.sleep(self._seconds / 4)
            if self._error is not None and number == self._fails_at:
                raise EngineDead(f"half loaded: {self._error}") if self.in_it else self._error
            yield number

    def close(self) -> None:
        self.closed = True


class FakeReceiver:
    """Stages `seconds` long, or fails as told; or hands over bucket by bucket what arrives in that time."""

    fails_at = 0
    arriving: Arriving

    def __init__(self, seconds: float = 0.5) -> None:
        self.seconds = seconds
        self.error: Exception | None = None
        self.gap: float | None = 0.0
        self.staged: list[tuple[int, int]] = []
        self.cancelled = 0
        self.closed = False

    async def stage(self, transfer: Transfer, rank: int) -> Any:
        try:
            await asyncio.sleep(self.seconds)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        if self.error is not None:
            raise self.error
        self.staged.append((transfer.version, rank))
        return Staged(transfer.version, self.gap)

    async def open(self, transfer: Transfer, rank: int) -> Any:
        self.staged.append((transfer.version, rank))
        self.arriving = Arriving(Staged(transfer.version, self.gap), self.seconds, self.error, self.fails_at)
        return self.arriving

    def close(self) -> None:
        self.closed = True
