"""What measuring costs, counted (docs/monitoring.md): the values a run writes grow with its turns, and few belong to each."""

from __future__ import annotations

import pytest
from virtual_world import small

from benchmarks.virtual.world import play
from segue.metrics.samples import total

pytestmark = pytest.mark.processes  # whole runs, if in one process

WRITES_PER_TURN = {"scheduler": 20, "rollout": 30, "envpool": 30}
"""At a write's 1.6 µs, 80 of them are 0.13 ms: of the tens of ms of CPU that a turn of the smoke config takes, well below 1 %."""


def writes_per_turn(steps: int) -> dict[str, float]:
    scrape = play(small(config={"steps": steps}), {steps}).scrapes[steps]
    turns = total(scrape, "rollout", "segue_turn_generate_seconds_count")
    assert turns >= 8 * steps
    return {role: total(scrape, role, "segue_metric_writes_total") / turns for role in WRITES_PER_TURN}


def test_a_turn_writes_few_values_and_no_more_in_a_longer_run() -> None:
    short, long = writes_per_turn(5), writes_per_turn(20)
    for role, most in WRITES_PER_TURN.items():
        assert 0 < long[role] <= most, (role, long)
        assert long[role] <= 1.2 * short[role], (role, short, long)
