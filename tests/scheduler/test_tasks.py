"""The task stream: every task once per epoch, and exact positions, whatever the moment of the save."""

from __future__ import annotations

import json

import pytest
from core_world import task

from scheduler.tasks import EpochSampler, TaskStream

TASKS = [task(i) for i in range(7)]


def ids(stream: TaskStream, count: int) -> list[str]:
    return [t.id for t in stream.take(count)]


def test_each_epoch_has_every_task_once_in_an_order_of_its_own() -> None:
    stream = TaskStream(TASKS, seed=3, shuffle=True)
    first, second = ids(stream, 7), ids(stream, 7)
    assert sorted(first) == sorted(second) == sorted(t.id for t in TASKS)
    assert first != second


def test_without_shuffle_tasks_come_in_order() -> None:
    stream = TaskStream(TASKS, seed=3, shuffle=False)
    assert ids(stream, 9) == ["t0", "t1", "t2", "t3", "t4", "t5", "t6", "t0", "t1"]


def test_the_seed_decides_the_order() -> None:
    orders = {tuple(ids(TaskStream(TASKS, seed=seed, shuffle=True), 7)) for seed in (1, 1, 2)}
    assert len(orders) == 2


@pytest.mark.parametrize("taken", range(23))
def test_f92_a_restored_stream_goes_on_exactly(taken: int) -> None:
    """Mid-epoch, at its very end, and three epochs on; through JSON, as a checkpoint stores it."""
    whole = ids(TaskStream(TASKS, seed=5, shuffle=True), 40)
    stream = TaskStream(TASKS, seed=5, shuffle=True)
    assert ids(stream, taken) == whole[:taken]
    state = json.loads(json.dumps(stream.state()))
    assert ids(stream, 40 - taken) == whole[taken:], "saving does not disturb the stream"
    restored = TaskStream(TASKS, seed=5, shuffle=True)
    restored.restore(state)
    assert ids(restored, 40 - taken) == whole[taken:]


def test_a_stream_restored_twice_is_still_exact() -> None:
    whole = ids(TaskStream(TASKS, seed=1, shuffle=True), 30)
    taken: list[str] = []
    stream = TaskStream(TASKS, seed=1, shuffle=True)
    for count in (3, 4, 0, 8, 6, 7, 2):
        taken += ids(stream, count)
        state = stream.state()
        stream = TaskStream(TASKS, seed=1, shuffle=True)
        stream.restore(state)
    assert taken == whole


def test_the_sampler_does_not_depend_on_global_randomness() -> None:
    assert EpochSampler(50, 9, True).order(4) == EpochSampler(50, 9, True).order(4)
    assert EpochSampler(50, 9, True).order(4) != EpochSampler(50, 9, True).order(5)
