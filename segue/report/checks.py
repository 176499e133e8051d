"""Promise 4 (docs/design.md §4) on a summary: counts add up. What does not is said in its notes, never hidden."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from segue.metrics.vocabulary import PREFILL_CAUSES


def contradictions(summary: Mapping[str, Any]) -> list[str]:
    """One sentence per pair of figures that contradict each other; empty for a sound summary."""
    return [*_episodes(summary["episodes"]), *_prefill(summary["prefill"]), *_staleness(summary["staleness"])]


def _episodes(counts: Mapping[str, Any]) -> Iterator[str]:
    states = counts["states"]
    if counts["admitted"] != sum(states.values()):
        yield f"{counts['admitted']} episodes were admitted, but the states hold {sum(states.values())}."
    for state in ("dropped", "failed"):
        if sum(counts[state].values()) != states.get(state, 0):
            yield f"{states.get(state, 0)} episodes are {state}, but their reasons add up to {sum(counts[state].values())}."
    if counts["resumed"] > counts["paused"]:
        yield f"{counts['resumed']} requests were resumed, but only {counts['paused']} were paused."


def _prefill(tokens: Mapping[str, int]) -> Iterator[str]:
    by_cause = sum(tokens[cause] for cause in PREFILL_CAUSES)
    if by_cause != tokens["engine_total"]:
        yield f"{by_cause} prefilled tokens have a cause, but the engines counted {tokens['engine_total']}."


def _staleness(ages: Mapping[str, Any]) -> Iterator[str]:
    if ages["max"] is not None and ages["max"] > ages["bound"]:
        yield f"A token of age {ages['max']} was trained, above staleness.max_age = {ages['bound']}."
