"""How many deaths of a role are borne."""

from __future__ import annotations

from segue.cluster.restarts import WINDOW_SECONDS, Restarts


def test_only_deaths_within_the_window_count() -> None:
    counts = Restarts(limit=2)
    assert [counts.died("rollout-0", now) for now in (0.0, 10.0)] == [1, 2]
    assert not counts.too_many("rollout-0")
    assert counts.died("rollout-0", WINDOW_SECONDS + 5.0) == 2, "the first one is long ago"
    assert counts.died("rollout-0", WINDOW_SECONDS + 6.0) == 3
    assert counts.too_many("rollout-0")
    assert not counts.too_many("rollout-1")


def test_processes_are_numbered_by_name() -> None:
    counts = Restarts(limit=0)
    assert [counts.start("envpool-0"), counts.start("envpool-0"), counts.start("envpool-1")] == [1, 2, 1]
