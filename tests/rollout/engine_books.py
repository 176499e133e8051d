"""Every engine test's books: whatever a test does with its engine, each prefilled token has one cause and the causes sum to what
was computed, by the engine's own count and by one that shares nothing with it.

A `Books` stands between a test and its engine. It gives each chunk's admissions to a ledger, as an episode loop would, and keeps
hold of what never reached a consumer (a test may cancel one). `balance` is called when the engine is idle, at the end.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

from rollout.ledger import EpisodeKv, Ledger
from rollout.sampled import Sampled
from segue.ports.engine import Chunk, GenerateRequest


class _Open(dict[str, Any]):
    """An engine's open requests, which it forgets; this remembers them."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Sampled] = []

    def __setitem__(self, name: str, sequence: Sampled) -> None:
        self.seen.append(sequence)
        super().__setitem__(name, sequence)


class Books:
    """Of one engine, from before its first request."""

    def __init__(self, engine: Any) -> None:
        self.ledger = Ledger()
        self._engine = engine
        self._episodes: dict[int, tuple[EpisodeKv, int, int]] = {}
        self._generate = engine.generate
        engine.generate = self._watched
        engine._open = self._open = _Open()

    async def _watched(self, request: GenerateRequest) -> AsyncIterator[Chunk]:
        kv, prompt, length = self._episodes.get(request.episode, (self.ledger.lease(), len(request.tokens), 0))
        if len(request.tokens) < length:  # the test plays another episode under the same number
            kv, prompt = self.ledger.lease(), len(request.tokens)
        kv.request(len(request.tokens), prompt, request.lineage)
        length = len(request.tokens)
        stream = self._generate(request)
        try:
            async for chunk in stream:
                for admission in chunk.admissions:
                    kv.admit(admission)
                kv.sampled(len(chunk.tokens))
                length += len(chunk.tokens)
                yield chunk
        finally:
            self._episodes[request.episode] = kv, prompt, length
            await stream.aclose()

    @property
    def used(self) -> bool:
        """Whether there was any request."""
        return bool(self._open.seen)

    def balance(self, computed: int, found: int) -> None:
        """The engine is idle: everything adds up. `computed` and `found` are counted apart, in tokens."""
        counts = self._engine.counts()
        lost = [a for sequence in self._open.seen for a in sequence._admissions]  # whose consumer was gone
        lost += [a for sequence in self._open.seen for chunk in sequence.out._chunks for a in chunk.admissions]
        self.ledger.settle(counts)
        total = self.ledger.total + sum(admission.prefilled for admission in lost)
        assert total == counts.prefill_tokens == computed, (total, counts.prefill_tokens, computed, dict(self.ledger.prefilled))
        cached = self.ledger.cached + sum(admission.cached for admission in lost)
        assert cached <= counts.cached_tokens == found, (cached, counts.cached_tokens, found)
