"""Redundancy: a group begins with G + r members, the first G valid ones ship, and the others end wherever they are."""

from __future__ import annotations

from typing import Any

import pytest
from core_world import ModelLease, ModelNode, World, make_config, task

from scheduler.core import commands as c
from scheduler.core import events as e
from segue.episode import DropReason, State
from segue.ports.rollout import Finish, SliceUsed


def begun(size: int = 2, extra: int = 2, places: int = 0, **sections: Any) -> tuple[World, ModelNode]:
    """Places for one group and its extra members, unless said otherwise."""
    world = World(make_config(group__size=size, group__redundancy=extra, batch__groups=1, **sections))
    node = world.join("rollout-0", places or size + extra)
    world.update_all()
    world.send(e.TrainingOpened(100))
    return world, node


def lease(node: ModelNode, member: int, group: int = 0) -> ModelLease:
    return next(one for one in node.leases.values() if (one.grant.group, one.grant.member) == (group, member))


def finish(world: World, node: ModelNode, member: int, tokens: int = 1, outcome: str = "terminated") -> None:
    one = lease(node, member)
    world.delta(node, one, tokens=tokens, reward=float(member))
    world.finish(node, one, outcome=outcome)


def shipped(world: World) -> list[int]:
    return [member.member for member in world.plans[0].groups[0].members]


def dropped(world: World, stage: str = "rollout") -> int:
    return world.core.tables.episodes.dropped[DropReason.REDUNDANT, stage]


def drops(world: World) -> list[str]:
    return [command for command in world.trace if command.startswith("DropAttempt")]


def test_the_first_g_ship_and_the_others_are_told_to_stop() -> None:
    world, node = begun(2, 2)
    assert sorted(one.grant.member for one in node.leases.values()) == [0, 1, 2, 3]
    late = {member: lease(node, member) for member in (0, 2)}
    world.delta(node, late[0], tokens=7)
    world.delta(node, late[2], tokens=5)
    finish(world, node, 3, tokens=3)
    assert not world.plans and not drops(world)
    finish(world, node, 1)
    assert shipped(world) == [1, 3] and world.plans[0].groups[0].size == 2
    assert drops(world) == [repr(c.DropAttempt("rollout-0", 1, late[m].grant.episode, 1, "redundant")) for m in (0, 2)]
    assert dropped(world) == 2 and dropped(world, "queue") == 0
    assert world.tally("tokens_dropped", "redundant") == world.core.groups.redundant_tokens == 12
    assert world.core.groups.redundant_episodes == 2
    assert {one.grant.group for one in node.leases.values()} == {1}, "their places are given away at once"


def test_a_finish_that_crosses_the_drop_is_refused_and_counted_once() -> None:
    world, node = begun(2, 1)
    late = lease(node, 2)
    finish(world, node, 0)
    finish(world, node, 1)
    counts = dict(world.core.tables.episodes.counts)
    world.delta(node, late, tokens=4)
    said = Finish(*late.key, late.seq, "terminated", 1, late.reward, 0, 1.0)
    assert world.send(said) == world.send(said) == [c.Refuse(*late.key)]
    assert world.tally("refused", "stale_attempt") == 3
    assert world.core.tables.episodes.counts == counts and dropped(world) == 1
    assert world.tally("finished", "latency", "terminated") == 2 and shipped(world) == [0, 1]
    assert world.tally("tokens_dropped", "redundant") == 0, "tokens that were never accepted are the node's to count"


def test_members_that_wait_are_parked_or_rest_end_in_place() -> None:
    world, node = begun(2, 4, places=4, rollout__slice_tokens=10, scheduler__retries_env=3)
    world.send(e.EvalStarted("first", [task(900)], 0.0))
    parked = lease(node, 3)
    world.send(SliceUsed(*parked.key))
    world.park(node, parked)  # its place goes to the evaluation
    failed = lease(node, 2)
    world.fail(node, failed, failure="env")  # and that of this one to the member that waited first
    group = world.core.groups.live[0]
    assert (group.members[2].resting, group.members[3].state) == (True, State.PARKED)
    assert [member.state for member in group.members[4:]] == [State.LEASED, State.PENDING]
    finish(world, node, 0)
    finish(world, node, 1)
    assert shipped(world) == [0, 1] and dropped(world) == 4
    assert all(member.state is State.DROPPED for member in group.members[2:])
    world.rest()
    assert not any(one.grant.group == 0 for one in node.leases.values()), "nobody of them comes back"
    world.drain(3)


def test_extra_members_take_the_place_of_failed_ones() -> None:
    world, node = begun(3, 2, scheduler__retries_data=0)
    for member in (0, 1):
        world.fail(node, lease(node, member), failure="data")
    for member in (4, 2, 3):
        finish(world, node, member)
    assert shipped(world) == [2, 3, 4] and dropped(world) == 0


def test_where_fewer_than_g_can_be_valid_min_valid_decides() -> None:
    world, node = begun(3, 1, scheduler__retries_data=0)
    for member in (0, 1):
        world.fail(node, lease(node, member), failure="data")
    finish(world, node, 2)
    finish(world, node, 3)
    assert shipped(world) == [2, 3], "two of three are enough, and nobody else runs"

    world, node = begun(3, 1, scheduler__retries_data=0)
    for member in (0, 1, 2):
        world.fail(node, lease(node, member), failure="data")
    assert 0 not in world.core.groups.live and dropped(world) == 0
    assert world.core.tables.episodes.dropped[DropReason.GROUP_FAILED, "rollout"] == 1


MASKED: dict[str, Any] = {"learner__mask_outcomes": ["truncated_wall"], "scheduler__retries_data": 0}


def test_members_whose_outcome_is_masked_do_not_make_a_group_complete() -> None:
    world, node = begun(2, 1, **MASKED)
    finish(world, node, 0, outcome="truncated_wall")
    finish(world, node, 1)
    assert not world.plans
    finish(world, node, 2)
    assert shipped(world) == [1, 2] and dropped(world, "queue") == 1, "it finished for nothing"


def test_a_group_without_g_valid_members_is_filled_up_with_the_first_of_the_others() -> None:
    world, node = begun(3, 2, **MASKED)
    for member in (4, 1, 3):
        finish(world, node, member, outcome="truncated_wall")
    finish(world, node, 2)
    finish(world, node, 0)
    assert shipped(world) == [0, 2, 4] and dropped(world, "queue") == 2


def test_equal_rewards_are_judged_by_those_that_ship() -> None:
    world, node = begun(2, 1, group__filter_zero_variance=True)
    for member in (0, 1):
        world.finish(node, lease(node, member))
    assert not world.plans and dropped(world) == 1
    assert world.core.tables.episodes.dropped[DropReason.ZERO_VARIANCE, "queue"] == 2


def test_a_group_is_nearly_finished_by_what_it_still_needs() -> None:
    world, node = begun(4, 3)
    group = world.core.groups.live[0]
    for member in range(2):
        finish(world, node, member)
    assert group.rank == 0
    finish(world, node, 2)
    assert group.running == 4 and group.rank == -1, "one more valid member is all it takes"


@pytest.mark.parametrize("bound", [0, 1, 3])
def test_admission_counts_groups_whatever_members_they_have(bound: int) -> None:
    world = World(make_config(group__size=2, group__redundancy=2, staleness__max_age=bound))
    world.join("rollout-0", 100)
    world.update_all()
    world.send(e.TrainingOpened(1000))
    assert len(world.core.groups.live) == (bound + 1) * 2
    assert world.core.tables.episodes.counts[State.LEASED] == (bound + 1) * 2 * 4
    world.drain(8)
    assert all(len(group.members) == 2 for plan in world.plans.values() for group in plan.groups)


def test_an_evaluation_has_no_extra_members() -> None:
    world, _ = begun(2, 2)
    world.send(e.EvalStarted("now", [task(900), task(901)], 0.0))
    assert world.core.tables.episodes.eval_admitted == 2
    world.drain(2)
    assert world.core.eval_run("now").done and world.core.eval_run("now").finished == 2  # type: ignore[union-attr]


def test_extra_members_of_a_dead_node_are_not_missed() -> None:
    world, node = begun(2, 2, places=2)
    other = world.join("rollout-1", 2)
    world.settle_updates()
    assert {one.grant.group for one in (*node.leases.values(), *other.leases.values())} == {0}
    finish(world, node, 0)
    del world.nodes[other.name]
    world.send(e.NodeLost(other.name, other.session, "killed"))
    assert world.tally("attempts_failed", "infra", "node_lost") == 2
    finish(world, node, 1)
    assert shipped(world) == [0, 1] and dropped(world) == 2
    assert not any(one.grant.group == 0 for one in node.leases.values())
    world.drain(3)


@pytest.mark.parametrize("mode", ["sync", "one_step_off", "async"])
def test_a_straggler_holds_nobody_up(mode: str) -> None:
    """One episode never ends: its group trains without it, in every mode, sync too."""
    world = World(make_config(mode=mode, group__size=2, group__redundancy=1, steps=6, rollout__max_episodes=8))
    world.join("rollout-0")
    world.update_all()
    world.send(e.TrainingOpened(6))
    world.held = next(iter(world.nodes["rollout-0"].leases))
    world.drain(6)
    counts = world.core.tables.episodes.counts
    assert counts[State.TRAINED] == 6 * 2 * 2 and dropped(world) == 6 * 2 == counts[State.DROPPED]
    assert not world.core.groups.live
