"""How many deaths of a role are borne, and what they were."""

from __future__ import annotations

from segue.cluster.restarts import WINDOW_SECONDS, Restarts


def test_only_deaths_within_the_window_count() -> None:
    counts = Restarts(limit=2)
    assert [counts.died("rollout-0", "died", now) for now in (0.0, 10.0)] == [1, 2]
    assert not counts.too_many("rollout-0")
    assert counts.died("rollout-0", "died", WINDOW_SECONDS + 5.0) == 2, "the first one is long ago"
    assert counts.died("rollout-0", "silent", WINDOW_SECONDS + 6.0) == 3
    assert counts.too_many("rollout-0")
    assert not counts.too_many("rollout-1")


def test_all_reasons_are_kept_by_name() -> None:
    counts = Restarts(limit=0)
    for now, (name, reason) in enumerate([("envpool-0", "died"), ("envpool-0", "silent"), ("envpool-1", "engine")]):
        counts.died(name, reason, now * WINDOW_SECONDS)
    counts.died("envpool-0", "silent", 9 * WINDOW_SECONDS)
    assert counts.reasons("envpool-0") == {"died": 1, "silent": 2}
    assert counts.reasons("rollout-0") == {}
