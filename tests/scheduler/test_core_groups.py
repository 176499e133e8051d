"""Groups: when they ship, when they fall, and what happens to late and surplus members."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
from core_world import ModelNode, World, make_config

from scheduler.core import commands as c
from scheduler.core import events as e
from segue.episode import DropReason, State


def one_group(size: int = 4, **sections: object) -> tuple[World, ModelNode]:
    """Just one group's worth of places, so that group 0 can be watched."""
    world = World(make_config(group__size=size, batch__groups=1, **sections))
    node = world.join("rollout-0", size)
    world.update_all()
    world.send(e.TrainingOpened(100))
    return world, node


def finish(world: World, node: ModelNode, index: int, reward: float | None = None, outcome: str = "terminated") -> None:
    lease = next(lease for lease in node.leases.values() if lease.grant.group == 0 and lease.grant.member == index)
    world.delta(node, lease, reward=float(index) if reward is None else reward)
    world.finish(node, lease, outcome=outcome)


def fail(world: World, node: ModelNode, index: int, failure: str = "data") -> None:
    lease = next(lease for lease in node.leases.values() if lease.grant.group == 0 and lease.grant.member == index)
    world.fail(node, lease, failure)


@pytest.mark.parametrize(("size", "failed"), [(4, 0), (4, 1), (4, 2), (3, 1), (2, 0)])
def test_f14_a_group_ships_with_at_least_half_of_its_members(size: int, failed: int) -> None:
    world, node = one_group(size, scheduler__retries_data=0)
    for index in range(size):
        if index < failed:
            fail(world, node, index)
        else:
            finish(world, node, index)
    plan = world.plans[0]
    assert [m.member for m in plan.groups[0].members] == list(range(failed, size))
    assert plan.groups[0].size == size


def test_a_group_that_cannot_reach_min_valid_falls_at_once() -> None:
    world, node = one_group(4, scheduler__retries_data=0)
    finish(world, node, 3)
    fail(world, node, 0)
    fail(world, node, 1)
    assert 0 in world.core.groups.live, "two members can still be valid"
    fail(world, node, 2)
    assert 0 not in world.core.groups.live
    dropped = world.core.tables.episodes.dropped
    assert dropped[DropReason.GROUP_FAILED, "queue"] == 1
    assert world.core.tables.episodes.counts[State.FAILED] == 3


MASKED: dict[str, Any] = {"learner__mask_outcomes": ["truncated_wall"], "scheduler__retries_data": 0}


def test_members_with_a_masked_outcome_are_not_valid_and_ship_along() -> None:
    """The learner keeps them out of loss and baseline: a group of four needs two others."""
    world, node = one_group(4, **MASKED)
    finish(world, node, 0, outcome="truncated_wall")
    fail(world, node, 1)
    finish(world, node, 2)
    finish(world, node, 3)
    assert [(m.member, m.outcome) for m in world.plans[0].groups[0].members] == [
        (0, "truncated_wall"), (2, "terminated"), (3, "terminated")
    ]  # fmt: skip


def test_a_group_with_too_few_members_whose_outcome_counts_falls_as_soon_as_that_is_known() -> None:
    world, node = one_group(4, **MASKED)
    finish(world, node, 0)
    finish(world, node, 1, outcome="truncated_wall")
    finish(world, node, 2, outcome="truncated_wall")
    assert 0 in world.core.groups.live
    finish(world, node, 3, outcome="truncated_wall")
    assert 0 not in world.core.groups.live and not world.plans
    assert world.core.tables.episodes.dropped[DropReason.GROUP_FAILED, "queue"] == 4

    world, node = one_group(3, group__min_valid=3, **MASKED)
    finish(world, node, 0, outcome="truncated_wall")
    assert 0 not in world.core.groups.live, "its other members are stopped at once"
    assert world.core.tables.episodes.dropped[DropReason.GROUP_FAILED, "rollout"] == 2


def test_zero_variance_is_judged_by_the_members_whose_outcome_counts() -> None:
    world, node = one_group(3, group__filter_zero_variance=True, **MASKED)
    finish(world, node, 0, reward=5.0, outcome="truncated_wall")
    finish(world, node, 1, reward=1.0)
    finish(world, node, 2, reward=1.0)
    assert not world.plans and world.core.tables.episodes.dropped[DropReason.ZERO_VARIANCE, "queue"] == 3


def test_many_filtered_groups_in_a_row_are_worth_a_warning_and_then_twice_as_many() -> None:
    """The run does not stall on them: each one's place is free at once."""
    world = World(make_config(batch__groups=1, staleness__max_age=0, group__filter_zero_variance=True))
    world.join("rollout-0", 2)
    world.update_all()
    world.send(e.TrainingOpened(100))
    for _ in range(3 * 450):
        world.serve(rewards=lambda episode: 1.0)
    said = [int(line.split()[0]) for line in world.warnings]
    assert said == [100, 200, 400]
    world.drain(1)


def test_many_groups_in_a_row_of_which_too_little_can_be_trained_are_worth_a_warning() -> None:
    world, node = one_group(2, **MASKED)
    for _ in range(150):
        while not node.leases:
            assert world.serve()
        lease = next(iter(node.leases.values()))
        world.delta(node, lease, reward=0.0)
        world.finish(node, lease, outcome="truncated_wall")
    (said,) = world.warnings
    assert said.startswith("100 groups in a row were dropped; the last because fewer than group.min_valid = 2 of its members")
    assert "1 with truncated_wall have an outcome that learner.mask_outcomes keeps out" in said


def test_the_running_members_of_a_fallen_group_are_told_to_stop() -> None:
    world, node = one_group(2, scheduler__retries_data=0)
    fail(world, node, 0)
    assert all(lease.grant.group != 0 for lease in node.leases.values())
    assert world.core.tables.episodes.dropped[DropReason.GROUP_FAILED, "rollout"] == 1


def test_f54_what_arrives_for_a_fallen_group_is_refused_and_counted() -> None:
    world, node = one_group(2, scheduler__retries_data=0)
    late = next(lease for lease in node.leases.values() if lease.grant.member == 1)
    fail(world, node, 0)
    counts = dict(world.core.tables.episodes.counts)
    world.delta(node, late)
    world.finish(node, late)
    assert world.tally("refused", "stale_attempt") == 2
    assert world.core.tables.episodes.counts == counts


def test_f63_order_is_a_preference_and_not_a_lock() -> None:
    """The oldest group hangs; those behind it are trained, and when its node dies its member goes on."""
    world = World(make_config(batch__groups=1, staleness__max_age=3))
    stuck = world.join("rollout-0", 2)
    world.update_all()
    world.send(e.TrainingOpened(100))
    other = world.join("rollout-1", 2)
    world.settle_updates()
    held = {lease.grant.group for lease in stuck.leases.values()}
    assert len(held) == 1
    for _ in range(2):
        for lease in list(other.leases.values()):
            world.delta(other, lease, reward=float(lease.grant.episode % 2))
            world.finish(other, lease)
    assert not held & {g.group for plan in world.plans.values() for g in plan.groups}
    assert len(world.plans) == 2
    del world.nodes["rollout-0"]
    world.heard(other)
    world.advance(14.0)
    world.heard(other)
    world.advance(2.0)
    assert world.tally("fenced", "silent") == 1
    world.drain(4)
    assert held <= {g.group for plan in world.plans.values() for g in plan.groups}


def test_zero_variance_counts_in_the_batch_unless_filtered() -> None:
    world, node = one_group(2)
    for index in range(2):
        finish(world, node, index, reward=1.0)
    assert world.tally("groups_zero_variance", "latency") == 1
    assert 0 in world.plans

    world, node = one_group(2, group__filter_zero_variance=True)
    for index in range(2):
        finish(world, node, index, reward=1.0)
    assert world.tally("groups_zero_variance", "latency") == 1
    assert not world.plans
    assert world.core.tables.episodes.dropped[DropReason.ZERO_VARIANCE, "queue"] == 2


@pytest.mark.parametrize(("size", "batch"), list(product([1, 2, 3, 5], [1, 2, 3])))
def test_f56_any_group_and_batch_size_goes_on(size: int, batch: int) -> None:
    config = make_config(group__size=max(2, size), batch__groups=batch)
    if size == 1:  # no baseline, so the config refuses it for today's estimators; the scheduler does not mind
        config = config.model_copy(update={"group": config.group.model_copy(update={"size": 1, "min_valid": 1})})
    world = World(config)
    world.join("rollout-0", 3)
    world.join("rollout-1", 2)
    world.send(e.TrainingOpened(100))
    world.drain(6)
    assert all(len(g.members) == size for plan in world.plans.values() for g in plan.groups)


def test_a_nearly_finished_group_is_as_urgent_as_those_a_batch_older() -> None:
    world, node = one_group(4)
    group = world.core.groups.live[0]
    for index in range(2):
        finish(world, node, index)
    assert group.rank == 0
    finish(world, node, 2)
    assert group.rank == -1, "one member of four is left: one batch (of one group) up"


def test_completion_spread_is_observed() -> None:
    world, node = one_group(2)
    for lease, seconds in zip(list(node.leases.values()), (1.0, 3.0), strict=True):
        world.finish(node, lease, seconds=seconds)
    assert ("segue_group_completion_cv", "latency", 0.5) in world.core.tables.observations


def test_a_dropped_group_is_not_delivered_by_a_late_command() -> None:
    world, node = one_group(2, group__filter_zero_variance=True)
    for index in range(2):
        finish(world, node, index, reward=0.0)
    forgotten = [command for command in world.trace if command.startswith("Forget")]
    assert forgotten == [repr(c.Forget(0)), repr(c.Forget(1))]
