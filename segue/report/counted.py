"""What the role processes counted between two steps, for the line of the later one: where time, prefill and latency went."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from segue.metrics.samples import Scrape, quantile, role_of, total
from segue.metrics.vocabulary import PREFILL_CAUSES, ROLES, STATES

_STATES, _PREFILL = "segue_worker_state_seconds_total", "segue_prefill_tokens_total"
_DECODE, _ENV = "segue_decode_tokens_total", "segue_env_step_seconds"
NAMES = (_STATES, _PREFILL, _DECODE, _ENV)
"""The metrics that are asked for at each step."""
QUANTILES = {"env_step_p50_seconds": 0.5, "env_step_p95_seconds": 0.95}


def counted(grew: Scrape) -> dict[str, Any]:
    """The part of a step's line (`segue.report.steps`) that `grew` tells (`segue.metrics.samples.difference`).

    Of roles that are not in it nothing is said: null, never 0.
    """
    rollout = any(role_of(target) == "rollout" for target in grew)
    latencies = {key: quantile(grew, "envpool", _ENV, q) for key, q in QUANTILES.items()}
    return {
        "state_seconds": {role: states for role in ROLES if (states := _states(grew, role))} or None,
        "prefill_tokens": _prefill(grew) if rollout else None,
        "decode_tokens": int(total(grew, "rollout", _DECODE)) if rollout else None,
        **{key: None if found is None else round(found, 6) for key, found in latencies.items()},
    }


def _states(grew: Scrape, role: str) -> Mapping[str, float]:
    """Seconds per state, those of which there were any."""
    spent = {state: round(total(grew, role, _STATES, state=state), 4) for state in STATES[role]}
    return {state: seconds for state, seconds in spent.items() if seconds > 0.0}


def _prefill(grew: Scrape) -> dict[str, int]:
    return {cause: int(total(grew, "rollout", _PREFILL, cause=cause)) for cause in PREFILL_CAUSES}
