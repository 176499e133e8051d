"""A barrier over the batch: every turn takes as long as its slowest environment."""

from __future__ import annotations

from typing import Any

import pytest
from virtual_world import small

from benchmarks.barrier import Barrier, BarrierWorkers
from benchmarks.virtual.scenario import World
from benchmarks.virtual.workload import Workload
from benchmarks.virtual.world import play

STEPS, GROUPS, SIZE, TURNS = 2, 2, 3, 4


def world(**env: Any) -> World:
    rollout = {"nodes": 2, "max_episodes": 3, "slots": 3}
    return small(
        config={"mode": "sync", "steps": STEPS, "batch": {"groups": GROUPS}, "group": {"size": SIZE}, "rollout": rollout},
        engine={"decode_seconds": 1e-4, "decode_seconds_per_request": 0.0, "decode_seconds_per_kv_token": 0.0},
        env={"step_seconds": {"kind": "gaussian", "mean": 10.0, "spread": 5.0}, "reset_seconds": {"mean": 0.0}},
        workload={"turns": {"kind": "constant", "mean": float(TURNS)}, "action_tokens": {"kind": "constant", "mean": 2.0}},
        learner={"step_seconds": 0.0, "seconds_per_token": 0.0, "gather_seconds": 0.0},
        weights={"seconds": 0.0},
    )


def test_a_step_is_the_sum_over_turns_of_the_slowest_or_the_slowest_sum() -> None:
    played, barrier = world(), Barrier(GROUPS * SIZE)
    with_barrier = play(played, wrap=lambda workers: BarrierWorkers(workers, barrier))
    without = play(world())
    assert barrier.turns == STEPS * TURNS
    workload = Workload(played)
    order = [int(task.seed) for task in _tasks(played)]
    for step in range(STEPS):
        batch = [
            [workload.step_seconds.draw(group, member, turn) for turn in range(TURNS)]
            for group in order[step * GROUPS : (step + 1) * GROUPS]
            for member in range(SIZE)
        ]
        slowest_of_each = sum(max(times[turn] for times in batch) for turn in range(TURNS))
        slowest_sum = max(map(sum, batch))
        # Beside the environments: orders and exchanges, which are paced, and a few milliseconds of sampling.
        assert with_barrier.lines[step]["step_seconds"] == pytest.approx(slowest_of_each, abs=4.0)
        assert without.lines[step]["step_seconds"] == pytest.approx(slowest_sum, abs=4.0)
        assert slowest_of_each > slowest_sum + 4.0


def _tasks(played: World) -> list[Any]:
    from scheduler.tasks import TaskStream

    config = played.config
    tasks = Workload(played).tasks((config.steps + config.staleness.max_age + 2) * config.batch.groups)
    return TaskStream(tasks, config.seed, config.data.shuffle).take(STEPS * GROUPS)
