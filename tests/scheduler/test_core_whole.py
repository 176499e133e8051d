"""The core as a whole, in its plain course and at its smallest settings."""

from __future__ import annotations

import pytest
from core_world import World, make_config

from scheduler.core import events as e
from segue.episode import State


def ready_world(nodes: int = 2, **sections: object) -> World:
    world = World(make_config(**sections))
    for index in range(nodes):
        world.join(f"rollout-{index}")
    world.update_all()
    world.send(e.TrainingOpened(world.config.steps))
    return world


@pytest.mark.parametrize("mode", ["async", "one_step_off", "sync"])
def test_every_mode_trains_batch_after_batch(mode: str) -> None:
    world = ready_world(mode=mode)
    world.drain(20)
    assert world.trained == 20
    assert world.core.tables.episodes.counts[State.TRAINED] == 20 * 2 * 2


def test_the_run_ends_with_exactly_the_batches_asked_for() -> None:
    world = ready_world(steps=5)
    world.drain(5)
    while world.serve():
        pass
    counts = world.core.tables.episodes.counts
    assert world.core.progress.formed == 5
    assert counts[State.TRAINED] == world.core.tables.episodes.admitted == 5 * 2 * 2
