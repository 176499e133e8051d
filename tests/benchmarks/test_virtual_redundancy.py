"""Redundancy in virtual time: where episodes have a heavy tail, a synchronous step no longer waits for all of it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from virtual_world import small

from benchmarks.virtual.measure import measure
from benchmarks.virtual.scenario import World
from benchmarks.virtual.world import Ran, play
from segue.metrics.vocabulary import PREFILL_CAUSES

pytestmark = pytest.mark.processes  # whole runs, if in one process

TAIL: dict[str, Any] = {
    "env": {"step_seconds": {"kind": "pareto", "mean": 4.0, "spread": 1.5, "high": 50.0}, "reset_seconds": {"mean": 0.5}},
    "workload": {"turns": {"kind": "lognormal", "mean": 4.0, "spread": 0.9, "low": 1.0, "high": 20.0}},
}


def tailed(redundancy: int, **config: Any) -> World:
    """Room for every member of a batch at once."""
    rollout = {"max_episodes": 12, "slots": 12}
    return small(**TAIL, config={"steps": 5, "group": {"redundancy": redundancy}, "rollout": rollout} | config)


def check(ran: Ran, redundancy: int) -> None:
    """Exactly G of each group are trained; the others are dropped once each; nothing stays behind."""
    episodes, steps = ran.stopped["episodes"], len(ran.lines)
    assert [line["trajectories"] for line in ran.lines] == [8.0] * steps
    assert episodes["states"]["trained"] == 8 * steps
    dropped = sum(count for reason, count in episodes["dropped"].items() if reason.startswith("redundant"))
    assert dropped == ran.stopped["redundant"]["episodes"] >= 2 * redundancy * steps
    assert sum(episodes["states"][state] for state in ("pending", "leased", "parked", "assembling")) == 0
    for counts in ran.nodes.values():
        assert sum(counts[f"prefill_{cause}"] for cause in PREFILL_CAUSES) == counts["prefill_tokens"]
        assert counts["running"] == counts["waiting"] == counts["episodes"] == 0


def test_a_synchronous_step_is_shorter_and_what_that_costs_is_counted() -> None:
    plain, without = measure(tailed(0, mode="sync"), ceilings=False)
    figures, ran = measure(tailed(2, mode="sync"), ceilings=False)
    check(without, 0)
    check(ran, 2)
    assert without.stopped["redundant"] == {"episodes": 0, "tokens": 0}
    assert figures.step_seconds.mean < plain.step_seconds.mean
    assert figures.wasted.dropped > 0 == plain.wasted.dropped
    assert figures.wasted.run_share > plain.wasted.run_share
    sampled = sum(counts["decode_tokens"] for counts in ran.nodes.values())
    in_batches = sum(line["tokens_generated"] for line in ran.lines)
    assert in_batches + ran.stopped["redundant"]["tokens"] <= sampled, "the rest never reached the scheduler"


@pytest.mark.parametrize("mode", ["async", "one_step_off"])
def test_the_other_modes_train_exactly_g_too_and_two_runs_agree(mode: str) -> None:
    again = [play(tailed(1, mode=mode, update={"drain_seconds": 30.0})) for _ in range(2)]
    check(again[0], 1)
    assert msgspec.json.encode(again[0]) == msgspec.json.encode(again[1])


def test_failing_environments_and_slices_leave_no_place_behind() -> None:
    rollout = {"max_episodes": 4, "slots": 4, "slice_tokens": 60}
    world = small(**TAIL | {"env": {"error": 0.02, "crash": 0.002}}, config={"group": {"redundancy": 2}, "rollout": rollout})
    ran = play(world)
    assert len(ran.lines) == 6
    assert all(line["trajectories"] <= 8 for line in ran.lines)
    assert ran.stopped["counts"]["retries"] and ran.stopped["totals"]["slices_extended"] > 0
    assert ran.stopped["redundant"]["episodes"] > 0
