"""The re-prefill ledger: why each context token had to be computed (docs/design.md §7).

An engine says for every admission of a request how its context splits into cached and prefilled tokens. The ledger knows what
the engine cannot: what of an episode was computed before, here or on another node, and gives every prefilled token one cause.

    first          prompt tokens never computed before
    turn           tokens appended since the last request: observations, forced tokens, the last sampled token
    block          the tail of a cached prefix that did not fill a whole cache block (as the engine says)
    weight_update  computed here before, lost to new weights
    migration      computed before under an earlier lease (another node, or parked)
    preemption     computed here before, lost to a request that ran first
    eviction       computed here before, lost while the episode waited

The causes of all admissions sum to the engine's own count of prefilled tokens, because each is classified whole.
Pure: no clock, no engine.
"""

from __future__ import annotations

from collections import Counter

from segue.metrics.vocabulary import PREFILL_CAUSES
from segue.ports.engine import Admission, EngineCounts

_LOST = {"weight_update": "weight_update", "preemption": "preemption", "eviction": "eviction"}


class Ledger:
    """Totals of one node: prefilled tokens by cause, what they took in seconds, and cached tokens."""

    def __init__(self) -> None:
        self.prefilled: Counter[str] = Counter(dict.fromkeys(PREFILL_CAUSES, 0))
        self.seconds: dict[str, float] = dict.fromkeys(PREFILL_CAUSES, 0.0)
        self.cached = 0
        self._settled: dict[str, int] = dict.fromkeys(PREFILL_CAUSES, 0)
        self._settled_total = 0
        self._settled_seconds = 0.0
        self._unclaimed = 0

    @property
    def total(self) -> int:
        """All prefilled tokens; equals the engine's own count once every chunk has arrived."""
        return sum(self.prefilled.values())

    def lease(self, elsewhere: int = 0) -> EpisodeKv:
        """Follow one lease of an episode; its first `elsewhere` tokens were computed under earlier leases."""
        return EpisodeKv(self, elsewhere)

    def settle(self, counts: EngineCounts) -> None:
        """Charge the engine's prefill seconds since the last time to the tokens it computed since then, each the same.

        So a cause is charged at the speed the node had when it occurred, and totals never decrease. Tokens whose chunk is still
        on its way keep their seconds until it is booked; then all sum to the engine's own prefill seconds.
        """
        if counts.unclaimed_tokens > self._unclaimed:  # of a request that had ended for us and got its slot back in the engine
            self.prefilled["preemption"] += counts.unclaimed_tokens - self._unclaimed
            self._unclaimed = counts.unclaimed_tokens
        total = self.total
        fresh = total - self._settled_total
        if not fresh:
            return
        seconds = counts.prefill_seconds - self._settled_seconds
        per_token = max(0.0, seconds) / max(counts.prefill_tokens - self._settled_total, fresh)
        for cause, n in self.prefilled.items():
            if n > self._settled[cause]:
                self.seconds[cause] += (n - self._settled[cause]) * per_token
                self._settled[cause] = n
        self._settled_total = total
        self._settled_seconds += fresh * per_token


class EpisodeKv:
    """What is known about one episode's KV under one lease: `here` and `elsewhere` are how far its context was computed."""

    def __init__(self, ledger: Ledger, elsewhere: int) -> None:
        self._ledger = ledger
        self.elsewhere = elsewhere
        self.here = 0
        self._prompt = 0
        self._length = 0
        self._lineage: int | None = None
        self._changed_lineage = False
        self._again = False

    def request(self, tokens: int, prompt: int, lineage: int) -> None:
        """A request of `tokens` context tokens is submitted, the first `prompt` of them the prompt, reading KV of `lineage`."""
        assert tokens >= self._length, "a context is only ever appended to"
        self._length = tokens
        self._prompt = prompt
        self._changed_lineage = self._lineage is not None and lineage != self._lineage
        self._lineage = lineage
        self._again = False

    def admit(self, admission: Admission) -> dict[str, int]:
        """Book one admission. Returns its prefilled tokens by cause (only causes that occur)."""
        a = admission
        assert a.cached + a.prefilled == a.context and 0 <= a.block <= a.prefilled, a
        again, self._again = self._again, True
        if again:
            # The request had a slot before: whatever precedes the next token was computed then.
            self.here = max(self.here, a.context)
        block_end = a.cached + a.block
        here_end = _clamp(self.here, block_end, a.context)
        elsewhere_end = _clamp(self.elsewhere, here_end, a.context)
        prompt_end = _clamp(self._prompt, elsewhere_end, a.context)
        causes = {
            "block": a.block,
            "migration": elsewhere_end - here_end,
            "first": prompt_end - elsewhere_end,
            "turn": a.context - prompt_end,
            self._lost(a, again): here_end - block_end,
        }
        found = {cause: n for cause, n in causes.items() if n}
        prefilled = self._ledger.prefilled
        for cause, n in found.items():
            prefilled[cause] += n
        self._ledger.cached += a.cached
        self.here = max(self.here, a.context)
        return found

    def sampled(self, n: int) -> None:
        """`n` more tokens of the running request: all of the context but the newest token has been computed."""
        self._length += n
        if n:
            self.here = max(self.here, self._length - 1)

    def _lost(self, admission: Admission, again: bool) -> str:
        """Why KV that was here is gone. What an engine leaves open, the ledger knows: a slot lost, other weights, other needs."""
        return _LOST.get(admission.lost, "preemption" if again else "weight_update" if self._changed_lineage else "eviction")


def _clamp(value: int, low: int, high: int) -> int:
    return max(low, min(value, high))
