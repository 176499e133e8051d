"""Whose KV a request may read, and what of an episode's KV was found again. Pure bookkeeping.

vLLM finds a prefix again by its tokens and a *salt*. Requests of a lineage (the weight version whose KV they may read) have its
salt. A request of an older lineage (`keep`) whose KV was evicted finds nothing, and its context is computed under the weights now
loaded: from then on it is of that version, but its blocks are filed under the old salt. So it is written down under which version
the first block of a prefix was computed, which tells the truth for everybody who finds that prefix.
"""

from __future__ import annotations

from dataclasses import dataclass

from segue.ports.engine import Admission, GenerateRequest


@dataclass(slots=True)
class _Held:
    """What an episode left: KV of the first `kv` of `tokens`, filed under `salt`."""

    salt: str
    kv_version: int
    tokens: list[int]
    kv: int


@dataclass(slots=True)
class Found:
    """An admission, and the version of the KV the request now goes on with."""

    admission: Admission
    kv_version: int


class Lineages:
    """Of one engine. `name` keeps its salts apart from those of others on the same vLLM."""

    def __init__(self, name: str, block: int) -> None:
        self._name = name
        self._block = block
        self._held: dict[int, _Held] = {}
        self._first: dict[tuple[str, tuple[int, ...]], int] = {}
        self.evictions = 0

    def salt(self, request: GenerateRequest) -> str:
        """The salt of a request; one of an episode goes on with the KV it left, if that is of its lineage."""
        held = self._held.get(request.episode)
        if held is not None and held.kv_version == request.lineage:
            return held.salt
        return f"{self._name}.{request.lineage}"

    def first(self, request: GenerateRequest, salt: str, tokens: list[int], cached: int, prefilled: int, version: int) -> Found:
        """A request was admitted for the first time. `version` is that of the weights then."""
        context = cached + prefilled
        kv_version = self._version(request, salt, tokens, cached, version)
        held = self._held.get(request.episode)
        lost, block = "", 0
        if held is not None and held.salt != salt:
            lost = "weight_update"
        elif held is not None:
            known = _common(held.tokens, tokens, min(held.kv, context))
            if cached < known - known % self._block:
                lost = "eviction"
                self.evictions += 1
            else:
                block = max(0, known - cached)
        return Found(Admission(context, cached, prefilled, lost, block), kv_version)

    def again(self, request: GenerateRequest, salt: str, tokens: list[int], cached: int, prefilled: int, version: int) -> Found:
        """A request got a slot back after another had taken its KV."""
        context = cached + prefilled
        block = prefilled if cached >= context - context % self._block else 0
        kv_version = self._version(request, salt, tokens, cached, version)
        return Found(Admission(context, cached, prefilled, "preemption", block), kv_version)

    def _version(self, request: GenerateRequest, salt: str, tokens: list[int], cached: int, version: int) -> int:
        key = (salt, tuple(tokens[: self._block]))
        if cached == 0:
            if len(tokens) > self._block:
                self._first[key] = version
            return version
        return self._first.get(key, request.lineage)

    def ended(self, episode: int, salt: str, kv_version: int, tokens: list[int], kv: int) -> None:
        """A request ended and left KV of the first `kv` of `tokens`."""
        self._held[episode] = _Held(salt, kv_version, tokens, kv)

    def loaded(self, version: int, salts: set[str]) -> None:
        """Other weights are loaded. `salts` are those of requests under way: what nobody can ask for any more is forgotten."""
        alive = salts | {held.salt for held in self._held.values()} | {f"{self._name}.{version}"}
        self._first = {key: first for key, first in self._first.items() if key[0] in alive}

    def forget(self, episode: int) -> None:
        """The episode is gone; vLLM lets go of its KV when it needs the room."""
        self._held.pop(episode, None)


def _common(a: list[int], b: list[int], limit: int) -> int:
    """How many of the first `limit` tokens are the same in both."""
    if a[:limit] == b[:limit]:
        return min(limit, len(a), len(b))
    return next(i for i in range(limit) if a[i : i + 1] != b[i : i + 1])
