"""What the routing benchmark makes of two summaries; a run of it is in docs/benchmarks.md."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.routing import CONFIG, WORKLOAD, compare, figures
from segue.config import load_config


def summary(cached: int, first: int, migration: int) -> dict[str, Any]:
    causes = {"first": first, "turn": 20, "migration": migration}
    return {"prefill": {**causes, "cached": cached, "engine_total": sum(causes.values())}, "tokens": {"trained": 7}}


def test_shares_and_their_medians() -> None:
    arm = figures(summary(cached=60, first=15, migration=5))
    assert arm["hit_share"] == 0.6 and arm["context_tokens"] == 100 and arm["migration_tokens"] == 5
    pairs = [
        {"affinity": figures(summary(c, 15, 5)), "least_loaded": figures(summary(d, 60, 20))}
        for c, d in ((60, 100), (40, 60), (160, 300))
    ]
    found = compare(pairs)
    assert found["hit_share"] == {"affinity": 0.6, "least_loaded": 0.5}
    assert found["hit_share_gain"] == pytest.approx(0.1)
    assert found["migration_tokens_per_context_token"]["affinity"] == 0.05


def test_the_workload_is_a_valid_config() -> None:
    config = load_config(CONFIG, [*WORKLOAD, "scheduler.affinity=false"])
    assert config.rollout.slice_tokens > 0 and not config.scheduler.affinity
