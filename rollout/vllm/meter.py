"""What an engine has done since it started, by vLLM's own step records."""

from __future__ import annotations

from dataclasses import dataclass

from rollout.vllm.record import StepRecord
from segue.ports.engine import EngineCounts


@dataclass(slots=True)
class Meter:
    """Totals. `load_seconds` went into loading weights."""

    prefill_tokens: int = 0
    cached_tokens: int = 0
    decode_tokens: int = 0
    scored_tokens: int = 0
    preemptions: int = 0
    step_seconds: float = 0.0
    prefill_seconds: float = 0.0
    score_seconds: float = 0.0
    load_seconds: float = 0.0

    def step(self, record: StepRecord, decoded: int) -> None:
        """A step in which `decoded` tokens were sampled."""
        self.prefill_tokens += record.prefill_tokens
        self.cached_tokens += record.cached_tokens
        self.decode_tokens += decoded
        self.preemptions += record.preemptions
        self.step_seconds += record.seconds
        self.prefill_seconds += record.prefill_seconds
        self.score_seconds += record.score_seconds

    def counts(self, *, running: int, waiting: int, evictions: int, discarded: int, unclaimed: int) -> EngineCounts:
        """The totals, and how things stand."""
        return EngineCounts(
            prefill_tokens=self.prefill_tokens,
            cached_tokens=self.cached_tokens,
            decode_tokens=self.decode_tokens,
            prefill_seconds=self.prefill_seconds,
            decode_seconds=self.step_seconds - self.prefill_seconds,
            busy_seconds=self.step_seconds + self.score_seconds + self.load_seconds,
            running=running,
            waiting=waiting,
            preemptions=self.preemptions,
            evictions=evictions,
            scored_tokens=self.scored_tokens,
            discarded_tokens=discarded,
            unclaimed_tokens=unclaimed,
        )
