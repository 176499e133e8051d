"""What an engine has done since it started, in tokens and seconds."""

from __future__ import annotations

from dataclasses import dataclass, field

from rollout.embedded.slots import SlotPolicy
from segue.metrics.vocabulary import ENGINE_PHASES
from segue.ports.engine import EngineCounts


@dataclass(slots=True)
class Meter:
    """Totals; `control_seconds` went into loading weights and scoring sequences.

    `phases` are real seconds in every mode, but for `load` and `score`, which are the loop's.
    """

    prefill_tokens: int = 0
    cached_tokens: int = 0
    decode_tokens: int = 0
    scored_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    control_seconds: float = 0.0
    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(ENGINE_PHASES, 0.0))

    def spent(self, phase: str, seconds: float) -> None:
        """More seconds in a phase."""
        self.phases[phase] += seconds

    def counts(self, policy: SlotPolicy, waiting: int) -> EngineCounts:
        """The totals, and how things stand with slots and the `waiting`."""
        return EngineCounts(
            prefill_tokens=self.prefill_tokens,
            cached_tokens=self.cached_tokens,
            decode_tokens=self.decode_tokens,
            prefill_seconds=self.prefill_seconds,
            decode_seconds=self.decode_seconds,
            busy_seconds=self.prefill_seconds + self.decode_seconds + self.control_seconds,
            running=len(policy.running()),
            waiting=waiting,
            preemptions=policy.preemptions,
            evictions=policy.evictions,
            scored_tokens=self.scored_tokens,
            phases=dict(self.phases),
        )
