"""The KV cache of a modelled engine: what idle episodes keep between their turns, in tokens. Pure.

Prefixes are kept per episode under the weight version they were computed with (their lineage), least recently used first to go.
The prompt that group-mates have in common is found in any mate's KV of that lineage; its memory is counted once per episode all
the same.
"""

from __future__ import annotations

from collections import OrderedDict


class _Prompt:
    """The common prompt of a group, as long as some member holds KV here."""

    __slots__ = ("lineage", "members", "tokens")

    def __init__(self, lineage: int, tokens: int) -> None:
        self.lineage = lineage
        self.tokens = tokens
        self.members: set[int] = set()


class Idle:
    """What an episode keeps between two requests."""

    __slots__ = ("group", "lineage", "tokens")

    def __init__(self, group: int, lineage: int, tokens: int) -> None:
        self.group = group
        self.lineage = lineage
        self.tokens = tokens


class KvCache:
    """`idle` tokens are held by episodes without a request; what runs is counted by the batch."""

    def __init__(self, block: int) -> None:
        self._block = block
        self._idle: OrderedDict[int, Idle] = OrderedDict()
        self._prompts: dict[int, _Prompt] = {}
        self._lost: dict[int, str] = {}
        self.idle = 0
        self.evictions = 0

    def find(self, episode: int, group: int, lineage: int, context: int) -> tuple[int, int]:
        """(tokens of `context` that are cached and can be read, tail of the prefix that fills no block). Changes nothing."""
        kept = self._idle.get(episode)
        there = min(kept.tokens, context) if kept is not None and kept.lineage == lineage else 0
        prompt = self._prompts.get(group)
        if prompt is not None and prompt.lineage == lineage and there < prompt.tokens <= context:
            there = prompt.tokens
        cached = there // self._block * self._block
        return cached, there - cached

    def take(self, episode: int, group: int, lineage: int, prompt: int | None) -> str:
        """The episode begins to run: its idle KV is the batch's now. Returns why something of it was lost, or "".

        `prompt`: tokens of the group's prompt, if this request's context is just that.
        """
        kept = self._idle.pop(episode, None)
        lost = self._lost.pop(episode, "")
        if kept is not None:
            self.idle -= kept.tokens
            if kept.lineage != lineage:
                lost = "weight_update"
                self._leave(episode, kept.group)
        found = self._prompts.get(group)
        if prompt is not None and (found is None or found.lineage != lineage):
            found = self._prompts[group] = _Prompt(lineage, prompt)
        if found is not None and found.lineage == lineage:
            found.members.add(episode)
        return lost

    def keep(self, episode: int, group: int, lineage: int, tokens: int) -> None:
        """The episode's request has ended; its KV stays until it is needed elsewhere."""
        self._idle[episode] = Idle(group, lineage, tokens)
        self.idle += tokens

    def held(self, episode: int) -> int:
        """Idle tokens of an episode."""
        kept = self._idle.get(episode)
        return kept.tokens if kept is not None else 0

    def evict(self, but: int = -1) -> bool:
        """Drop the idle KV that was used longest ago, not that of episode `but`. False if there is none."""
        for episode in self._idle:
            if episode != but:
                self._drop(episode, "eviction")
                self.evictions += 1
                return True
        return False

    def lose(self, episode: int, group: int, why: str) -> None:
        """What the running request of an episode had is gone; `why` is told at its next admission ("": there is none)."""
        if why:
            self._lost[episode] = why
        self._leave(episode, group)

    def forget(self, episode: int) -> None:
        """The episode left the engine."""
        if episode in self._idle:
            self._drop(episode, "")
        self._lost.pop(episode, None)

    def clear(self, why: str) -> None:
        """Nothing that is idle will be read again."""
        for episode in list(self._idle):
            self._drop(episode, why)

    def _drop(self, episode: int, why: str) -> None:
        kept = self._idle.pop(episode)
        self.idle -= kept.tokens
        if why:
            self._lost[episode] = why
        self._leave(episode, kept.group)

    def _leave(self, episode: int, group: int) -> None:
        prompt = self._prompts.get(group)
        if prompt is not None:
            prompt.members.discard(episode)
            if not prompt.members:
                del self._prompts[group]
