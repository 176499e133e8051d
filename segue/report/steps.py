"""One line of metrics.jsonl: what is in it, and in which order.

    step                 the batch's target step, from 0
    elapsed_seconds      since the run began          step_seconds      since the step before ended
    wait_seconds         of it, waiting for the batch
    version              newest weight version when the step was reported: the one that it trained on
    queue_groups         finished groups waiting       in_flight         episodes under a lease
    ages                 `ages[a]`: trained tokens of age a, in steps
    reprefill_tokens     since the step before, context tokens computed again because of weight updates, by all nodes
    reprefill_seconds    engine seconds that took                                  updates           completed by the nodes so far
    updates_coalesced    versions that never went to the nodes, so far             inflight          how the next update crosses
    redundant_episodes   since the step before, members dropped because G of their group were valid (group.redundancy)
    redundant_tokens     what had been sampled of them: each would have become at least as long
    since the step before, by the processes that answered when it ended (segue/report/counted.py); absent of a step that ended
    after the run was stopped, null what nobody said:
    state_seconds        by role and state, over all its processes (env pools: their slots)
    prefill_tokens       context tokens computed, by cause                         decode_tokens   sampled, evaluation included
    env_step_p50_seconds, env_step_p95_seconds   latency of environment steps, from bucket edges; null without one
    then the learner's statistics under its own names (learner/batches.py, learner/diagnostics.py): loss, grad_norm,
    reward_mean, reward_std, info_success, tokens_generated, tokens_trained, tokens_masked_age, kept_fraction,
    trajectories_trained, trajectories_multi_version, logprob_gap_mean, logprob_gap_max, logprob_gap_tokens, …

Every key that holds a wall-clock duration or moment ends in `seconds`; without those, two serial runs give equal lines.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from segue.errors import UserError
from segue.files import read_jsonl


def step_line(
    step: int,
    *,
    elapsed_seconds: float,
    step_seconds: float,
    wait_seconds: float,
    version: int,
    queue_groups: int,
    in_flight: int,
    ages: Sequence[int],
    reprefill: Mapping[str, Any],
    stats: Mapping[str, float],
    redundant: tuple[int, int] = (0, 0),
    since: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The line of one step; `reprefill` has tokens, seconds, updates, coalesced and inflight; `redundant` is (episodes, tokens);
    `since` what the roles counted; `stats` follow in their order."""
    line: dict[str, Any] = {
        "step": step,
        "elapsed_seconds": round(elapsed_seconds, 3),
        "step_seconds": round(step_seconds, 3),
        "wait_seconds": round(wait_seconds, 3),
        "version": version,
        "queue_groups": queue_groups,
        "in_flight": in_flight,
        "ages": list(ages),
        "reprefill_tokens": reprefill["tokens"],
        "reprefill_seconds": round(reprefill["seconds"], 4),
        "updates": reprefill["updates"],
        "updates_coalesced": reprefill["coalesced"],
        "inflight": reprefill["inflight"],
        "redundant_episodes": redundant[0],
        "redundant_tokens": redundant[1],
        **(since or {}),
    }
    taken = [name for name in stats if name in line]
    assert not taken, f"statistics named like a field of the line: {taken}"
    return line | dict(stats)


def read_steps(path: Path) -> list[dict[str, Any]]:
    """The lines of a metrics.jsonl, a torn last one left out. Raises `UserError` for a file or a line that is none."""
    lines = read_jsonl(path)
    for number, line in enumerate(lines, 1):
        if not is_step(line):
            raise UserError(f"Line {number} of {path} is not the line of a step: restore the file or remove that line.")
    return lines


def is_step(line: Mapping[str, Any]) -> bool:
    """Whether a line has its step, and figures of the shape that readers of lines rely on."""
    ages, prefill, spent = (line.get(key) or {} for key in ("ages", "prefill_tokens", "state_seconds"))
    return (
        _is_count(line.get("step"))
        and (ages == {} or (isinstance(ages, list) and all(map(_is_count, ages))))
        and _are_numbers(prefill)
        and isinstance(spent, dict)
        and all(map(_are_numbers, spent.values()))
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and value >= 0


def _are_numbers(values: Any) -> bool:
    return isinstance(values, dict) and all(isinstance(value, (int, float)) for value in values.values())


def without_seconds(line: Mapping[str, Any]) -> dict[str, Any]:
    """The line without durations and moments: equal in two serial runs of one config."""
    return {key: value for key, value in line.items() if not key.endswith("seconds")}


def number(line: Mapping[str, Any], key: str) -> float | None:
    """A statistic of a line; None if it is absent or not a finite number."""
    value = line.get(key)
    return float(value) if isinstance(value, (int, float)) and math.isfinite(value) else None


def total(lines: Iterable[Mapping[str, Any]], key: str) -> float:
    """The sum of a statistic over lines; absent ones count 0."""
    return sum(number(line, key) or 0.0 for line in lines)


def age_histogram(lines: Iterable[Mapping[str, Any]]) -> list[int]:
    """Trained tokens by age over all lines."""
    counts: list[int] = []
    for line in lines:
        ages = line.get("ages") or []
        counts += [0] * (len(ages) - len(counts))
        for age, count in enumerate(ages):
            counts[age] += count
    return counts


def age_mean(counts: Sequence[int]) -> float | None:
    """Mean age; None without a trained token."""
    tokens = sum(counts)
    return sum(age * count for age, count in enumerate(counts)) / tokens if tokens else None


def age_max(counts: Sequence[int]) -> int | None:
    """The greatest age of a trained token; None without one."""
    return max((age for age, count in enumerate(counts) if count), default=None)


def age_quantile(counts: Sequence[int], q: float) -> int | None:
    """The smallest age that at least a share `q` of the trained tokens do not exceed; None without one."""
    tokens, seen = sum(counts), 0
    for age, count in enumerate(counts):
        seen += count
        if tokens and seen >= q * tokens:
            return age
    return None
