"""Faults of other systems that no other test of the env pool meets head on (docs/faults.md)."""

from __future__ import annotations

import pytest
from pool_harness import make_config

from envpool.shell import limits_of
from envpool.slots import Slots


def test_f52_one_instance_after_another_goes_round_the_workers() -> None:
    """With all workers empty each time, the one with the lowest number is not the one that does all the work."""
    slots = Slots(3, 2)
    for seat in range(3):
        slots.open(seat)
    seats = []
    for _ in range(6):
        slot = slots.lease()
        assert slot is not None
        seats.append(slots.seat_of(slot))
        slots.closing(slot)
        slots.free(slot)
    assert seats == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("seconds", [60.0, 36_000.0])
def test_f72_an_environment_waits_for_its_agent_as_long_as_an_episode_may_take(seconds: float) -> None:
    """No time-out of the pool's own ends an agent that thinks for long: not even with an update in the middle of its turn."""
    config = make_config("latency")
    rollout = config.rollout.model_copy(update={"wall_seconds": seconds})
    limits = limits_of(config.model_copy(update={"rollout": rollout}))
    assert limits.idle_seconds >= seconds + config.update.deadline_seconds
    assert limits.step_seconds == config.envpool.step_seconds
