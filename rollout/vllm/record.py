"""What the scheduler inside vLLM tells the node after every step: plain values for MessagePack. Imports nothing of vLLM.

The record travels in a field of vLLM's own step statistics that takes any mapping (`kv_connector_stats`, which nothing else uses
here), and so arrives together with the step's tokens.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SCORE_PREFIX = "segue-score-"
"""Ids of requests that are scored while everything else is paused."""
EXTRA = "segue"
"""The key of `SamplingParams.extra_args` under which the sampler finds what it needs."""
SETTINGS = "segue"
"""The key of vLLM's `additional_config` under which the scheduler finds its settings."""


@dataclass(slots=True)
class Admitted:
    """A request's context as far as it was filled when it was complete, preempted or ended.

    `again`: it had a slot before. Counts are in tokens, the last one of the context not among them: it is fed to sample the next.
    """

    request: str
    cached: int
    prefilled: int
    again: bool


@dataclass(slots=True)
class StepRecord:
    """One step. `ended`: requests that were aborted and are gone. Seconds: of the step, of its prefill's share
    (`rollout.vllm.pace`), and of a step that scored (none of the others).

    `prefill_tokens` is what the workers computed beyond one token per row that sampled; `cached_tokens` and `refilled_tokens` (of
    preempted requests, all they had to fill anew, the last one included) are vLLM's own prefix statistics.
    """

    admitted: list[Admitted] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    prefill_tokens: int = 0
    cached_tokens: int = 0
    refilled_tokens: int = 0
    preemptions: int = 0
    seconds: float = 0.0
    prefill_seconds: float = 0.0
    score_seconds: float = 0.0

    def encode(self) -> dict[str, Any]:
        """As a mapping; what is empty is left out."""
        admitted = [[a.request, a.cached, a.prefilled, a.again] for a in self.admitted]
        fields = {
            "a": admitted,
            "e": self.ended,
            "p": self.prefill_tokens,
            "h": self.cached_tokens,
            "r": self.refilled_tokens,
            "n": self.preemptions,
            "s": self.seconds,
            "f": self.prefill_seconds,
            "c": self.score_seconds,
        }
        return {key: value for key, value in fields.items() if value}

    @classmethod
    def decode(cls, fields: Mapping[str, Any]) -> StepRecord:
        """The inverse of `encode`."""
        return cls(
            admitted=[Admitted(*a) for a in fields.get("a", ())],
            ended=list(fields.get("e", ())),
            prefill_tokens=fields.get("p", 0),
            cached_tokens=fields.get("h", 0),
            refilled_tokens=fields.get("r", 0),
            preemptions=fields.get("n", 0),
            seconds=fields.get("s", 0.0),
            prefill_seconds=fields.get("f", 0.0),
            score_seconds=fields.get("c", 0.0),
        )
