"""summary.json: the figures of a run, from what the driver gathered. Pure functions; what is not known is null, never 0."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from segue.metrics.samples import Scrape, role_of, total, values
from segue.metrics.vocabulary import PREFILL_CAUSES, ROLES, STATES, is_idle
from segue.report import steps
from segue.report.checks import contradictions
from segue.report.facts import EpisodeCounts, EvalResult, RunFacts, WeightSyncFigures

Lines = Sequence[Mapping[str, Any]]

EVALS = ("before", "after")


def build_summary(facts: RunFacts) -> dict[str, Any]:
    """The document of summary.json. docs/summary.md says what each key means."""
    lines = facts.lines
    summary: dict[str, Any] = {
        "mode": facts.mode,
        "steps": len({line["step"] for line in lines}),
        "attempts": facts.attempts,
        "wall_seconds": round(facts.wall_seconds, 3),
        "tokens": tokens(facts.metrics, lines),
        "staleness": staleness(lines, facts.bound),
        "episodes": episodes(facts.episodes),
        "prefill": prefill(facts.metrics),
        "reprefill": reprefill(facts),
        "redundancy": redundancy(lines),
        "roles": roles(facts.states),
        "weight_sync": weight_sync(facts.weight_sync),
        "logprob_gap": logprob_gap(lines) | {"probe_max": probe_max(facts.metrics)},
        "eval": {name: evaluation(facts.evals.get(name)) for name in (*EVALS, *sorted(set(facts.evals) - set(EVALS)))},
    }
    return summary | {"notes": [*facts.notes, *contradictions(summary)]}


def partial_summary(mode: str, bound: int, lines: Lines) -> dict[str, Any]:
    """What can be said of a run that has no summary (yet): everything that metrics.jsonl tells."""
    known = tokens({}, lines)
    return {
        "mode": mode,
        "steps": len({line["step"] for line in lines}),
        "wall_seconds": steps.number(lines[-1], "elapsed_seconds") if lines else None,
        "tokens": {"generated": None, "trained": known["trained"], "masked_age": known["masked_age"]},
        "staleness": staleness(lines, bound),
        "logprob_gap": logprob_gap(lines) | {"probe_max": None},
        "incomplete": True,
    }


def tokens(metrics: Scrape, lines: Lines) -> dict[str, int]:
    """Sampled by all engines (evaluation included); trained; and kept out of the loss by their age."""
    return {
        "generated": int(total(metrics, "rollout", "segue_decode_tokens_total")),
        "trained": int(steps.total(lines, "tokens_trained")),
        "masked_age": int(steps.total(lines, "tokens_masked_age")),
    }


def staleness(lines: Lines, bound: int) -> dict[str, Any]:
    """Ages in steps over all trained tokens, and the share of trained trajectories that several versions sampled."""
    ages = steps.age_histogram(lines)
    trained = steps.total(lines, "trajectories_trained")
    mixed = steps.total(lines, "trajectories_multi_version")
    return {
        "bound": bound,
        "mean": steps.age_mean(ages),
        "p99": steps.age_quantile(ages, 0.99),
        "max": steps.age_max(ages),
        "multi_version_ratio": mixed / trained if trained else None,
    }


def episodes(counts: EpisodeCounts) -> dict[str, Any]:
    """The scheduler's counts as they are."""
    return {
        "admitted": counts.admitted,
        "finished": counts.finished,
        "trained": counts.trained,
        "states": dict(counts.states),
        "dropped": dict(counts.dropped),
        "failed": dict(counts.failed),
        "paused": counts.paused,
        "resumed": counts.resumed,
    }


def prefill(metrics: Scrape) -> dict[str, int]:
    """Context tokens computed, by cause; found in the cache; and the engines' own count of the former."""
    result = {cause: int(total(metrics, "rollout", "segue_prefill_tokens_total", cause=cause)) for cause in PREFILL_CAUSES}
    result["cached"] = int(total(metrics, "rollout", "segue_cached_tokens_total"))
    result["engine_total"] = int(total(metrics, "rollout", "segue_engine_prefill_tokens_total"))
    return result


def reprefill(facts: RunFacts) -> dict[str, Any]:
    """What weight updates cost: tokens computed again and the engine seconds that took, in all, per update, per trained token (of
    a run in one attempt), and as a share of the rollout nodes' time."""
    tokens = int(total(facts.metrics, "rollout", "segue_prefill_tokens_total", cause="weight_update"))
    seconds = total(facts.metrics, "rollout", "segue_prefill_seconds_total", cause="weight_update")
    count, trained = sum(facts.node_updates.values()), int(steps.total(facts.lines, "tokens_trained"))
    there = sum(sum(spent.values()) for target, spent in facts.states.items() if role_of(target) == "rollout")
    return {
        "updates": count,
        "inflight": dict(facts.node_updates),
        "coalesced": dict(facts.coalesced),
        "tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_update": _ratio(tokens, count),
        "seconds_per_update": _ratio(seconds, count),
        "tokens_per_trained_token": _ratio(tokens, trained) if facts.attempts == 1 else None,
        "rollout_share": round(seconds / there, 6) if there else None,
    }


def redundancy(lines: Lines) -> dict[str, Any]:
    """Members dropped because G others were valid, the tokens in their logs, and what those say of the bias towards short ones.

    A dropped episode would have become at least as long as it was, so the mean length of all of them is at least that of batches
    and dropped ones together: `length_bias_at_most` is the mean of the batches over it. Below 1 the bias is certain, and at
    least so strong; 1 or more says nothing (members dropped before they began count as long as nothing).
    """
    dropped, lost = steps.total(lines, "redundant_episodes"), steps.total(lines, "redundant_tokens")
    shipped, sampled = steps.total(lines, "trajectories"), steps.total(lines, "tokens_generated")
    bias = (sampled / shipped) / ((sampled + lost) / (shipped + dropped)) if dropped and shipped and sampled else None
    return {"episodes": int(dropped), "tokens": int(lost), "length_bias_at_most": None if bias is None else round(bias, 6)}


def roles(states: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """Seconds per state over all processes of a role, and the share of them that was not waiting."""
    result: dict[str, Any] = {}
    for role in ROLES:
        targets = [seconds for target, seconds in states.items() if role_of(target) == role]
        if not targets:
            continue
        spent = {state: sum(seconds.get(state, 0.0) for seconds in targets) for state in STATES[role]}
        elapsed = sum(spent.values())
        busy = sum(seconds for state, seconds in spent.items() if not is_idle(state))
        result[role] = {
            "busy_ratio": round(busy / elapsed, 4) if elapsed else None,
            "states": {state: round(seconds, 3) for state, seconds in spent.items()},
        }
    return result


def weight_sync(figures: WeightSyncFigures) -> dict[str, Any]:
    """Updates, bytes sent, and means per transfer and per load."""
    return {
        "updates": figures.updates,
        "bytes": figures.bytes,
        "transfer_seconds_mean": _ratio(figures.transfer_seconds, figures.transfers),
        "pause_seconds_mean": _ratio(figures.pause_seconds, figures.loads),
    }


def logprob_gap(lines: Lines) -> dict[str, Any]:
    """|learner − engine| at equal version over all compared tokens, and how many those were."""
    compared = steps.total(lines, "logprob_gap_tokens")
    weighted = sum(
        (steps.number(line, "logprob_gap_mean") or 0.0) * (steps.number(line, "logprob_gap_tokens") or 0.0) for line in lines
    )
    largest = max((steps.number(line, "logprob_gap_max") or 0.0 for line in lines), default=0.0)
    return {
        "mean": weighted / compared if compared else None,
        "max": largest if compared else None,
        "tokens": int(compared),
    }


def probe_max(metrics: Scrape) -> float | None:
    """Largest |learner − engine| log-probability of the probe over all nodes and loads; None where nobody was probed."""
    probed = total(metrics, "weightsync", "segue_weight_sync_seconds_count", phase="probe")
    gaps = values(metrics, "rollout", "segue_weight_probe_gap_max_nats")
    return max(gaps, default=None) if probed else None


def evaluation(result: EvalResult | None) -> dict[str, Any] | None:
    """One evaluation, or None if it did not run."""
    return None if result is None else {"success": result.success, "n": result.n, "failed": result.failed}


def _ratio(total: float, count: int) -> float | None:
    return round(total / count, 6) if count else None
