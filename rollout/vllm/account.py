"""The books of the scheduler inside vLLM: who was admitted with how much cached, what of it was filled, how long it took.

Pure: told of each step what vLLM scheduled and when. A request of n tokens has a context of n − 1 to be filled, cached +
prefilled; its last token is fed to sample the next one and counts as decoded.

Two counts that share nothing but the step: per request, from what the scheduler gave each (`admit`, `scheduled`); and in all,
from what the workers did (`computed`): each token of a step that did not sample was context. The first is what the ledger gives
causes to, the second is the engine's own count, and the one must sum to the other.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from rollout.vllm.pace import Pace
from rollout.vllm.record import SCORE_PREFIX, Admitted, StepRecord


@dataclass(slots=True)
class _Filling:
    """A request whose context is being filled: `left` tokens of it, the last one included, are not yet scheduled."""

    cached: int
    left: int
    again: bool
    prefilled: int = 0


class Account:
    """Collects one `StepRecord` after the other. Scored sequences are only timed."""

    def __init__(self) -> None:
        self._step = StepRecord()
        self._filling: dict[str, _Filling] = {}
        self._had_slot: set[str] = set()
        self._pace = Pace()
        self._ended = 0.0

    def admit(self, request: str, tokens: int, cached: int) -> None:
        """A request of `tokens` tokens in all gets a slot, with KV of the first `cached` of them."""
        if request.startswith(SCORE_PREFIX):
            return
        self._filling[request] = _Filling(cached, tokens - cached, request in self._had_slot)
        self._had_slot.add(request)

    def scheduled(self, tokens: Iterable[tuple[str, int]]) -> None:
        """So many tokens of each request are computed in this step."""
        for request, count in tokens:
            filling = self._filling.get(request)
            if filling is None:
                continue
            filling.left -= count
            done = filling.left <= 0
            filling.prefilled += count - done
            if done:
                self._close(request)

    def preempted(self, request: str) -> None:
        """It lost its slot."""
        self._close(request)
        self._step.preemptions += not request.startswith(SCORE_PREFIX)

    def aborted(self, request: str) -> None:
        """It was ended from outside."""
        self.finished(request)
        self._step.ended.append(request)

    def finished(self, request: str) -> None:
        """It is gone, for whatever reason."""
        self._close(request)
        self._had_slot.discard(request)

    def _close(self, request: str) -> None:
        filling = self._filling.pop(request, None)
        if filling is not None:
            self._step.admitted.append(Admitted(request, filling.cached, filling.prefilled, filling.again))

    def looked_up(self, cached: int, refilled: int) -> None:
        """By vLLM's own prefix statistics: tokens found again by those just admitted, and to be filled anew by those
        preempted."""
        self._step.cached_tokens += cached
        self._step.refilled_tokens += refilled

    def computed(self, began: float, ended: float, tokens: int, rows: int, scores: bool) -> None:
        """The workers computed a step of `tokens` in all and sampled in `rows` requests. Steps may overlap: none counts twice."""
        seconds = max(0.0, ended - max(began, self._ended))
        self._ended = ended
        if scores:
            self._step.score_seconds += seconds
            return
        prefill = tokens - rows
        self._pace.observe(seconds, prefill, rows)
        self._step.prefill_tokens += prefill
        self._step.seconds += seconds
        self._step.prefill_seconds += self._pace.prefill_seconds(seconds, prefill, rows)

    def take(self) -> StepRecord:
        """Everything since the last call."""
        step, self._step = self._step, StepRecord()
        return step
