"""Admission: the rule, its smallest settings, back-pressure, and that filtered or failed groups give their place back."""

from __future__ import annotations

import pytest
from core_world import World, make_config, task

from scheduler.core import commands as c
from scheduler.core import events as e
from segue.episode import State
from segue.ports.rollout import SliceUsed


def opened(nodes: int = 1, places: int = 100, steps: int = 1000, **sections: object) -> World:
    """Weights of step 0 everywhere, training open."""
    world = World(make_config(steps=steps, **sections))
    for index in range(nodes):
        world.join(f"rollout-{index}", places)
    world.update_all()
    world.send(e.TrainingOpened(steps))
    return world


@pytest.mark.parametrize("bound", [0, 1, 2, 4])
def test_f04_f05_at_every_bound_exactly_eta_plus_one_batches_are_ahead(bound: int) -> None:
    world = opened(staleness__max_age=bound)
    assert len(world.core.groups.live) == (bound + 1) * 2
    for _ in range(12):
        world.drain(1)
        assert world.core.progress.formed * 2 + len(world.core.groups.live) <= (bound + world.trained + 1) * 2
    assert world.trained == 12


def test_f46_f61_the_smallest_settings_one_failure_then_a_hundred_filtered_groups() -> None:
    """B = 2, two places, η = 0, G = 2: a failed group and a filter that rejects everything, and rewards that vary again."""
    world = World(make_config(staleness__max_age=0, group__filter_zero_variance=True, scheduler__retries_data=0))
    node = world.join("rollout-0", 2)
    world.update_all()
    world.send(e.TrainingOpened(1000))
    world.fail(node, next(iter(node.leases.values())), "data")
    tally = world.core.tables.tally
    assert tally["groups_dropped", "group_failed"] == 1
    while tally["groups_dropped", "zero_variance"] < 100:
        lease = next(iter(node.leases.values()))
        world.delta(node, lease, reward=1.0)
        world.finish(node, lease)
    assert any("all their rewards are equal" in warning for warning in world.warnings)
    assert not world.plans
    world.drain(3)
    assert world.trained == 3


def test_a_filtered_group_warns_once_and_then_each_time_twice_as_late() -> None:
    world = opened(group__filter_zero_variance=True, places=4)
    node = world.nodes["rollout-0"]
    while world.tally("groups_dropped", "zero_variance") < 399:
        world.finish(node, next(iter(node.leases.values())))
    assert len(world.warnings) == 2


def test_f47_free_places_are_filled_while_a_group_waits_for_its_last_member() -> None:
    world = opened(places=4, group__size=4)
    node = world.nodes["rollout-0"]
    assert {lease.grant.group for lease in node.leases.values()} == {0}
    for lease in list(node.leases.values())[:3]:
        world.finish(node, lease)
    assert sorted(lease.grant.group for lease in node.leases.values()) == [0, 1, 1, 1]


def test_f48_the_consumer_takes_what_it_needs_and_the_rest_keeps_its_order() -> None:
    world = opened(staleness__max_age=4)
    node = world.nodes["rollout-0"]
    for lease in list(node.leases.values()):
        world.delta(node, lease, reward=float(lease.grant.episode % 2))
        world.finish(node, lease)
    # One batch is formed for the learner and one ahead of it; three batches' worth of groups waits.
    assert [g.group for g in world.plans[0].groups] == [0, 1]
    assert [g.group for g in world.plans[1].groups] == [2, 3]
    assert sorted(group for group, _ in world.core.groups.ready) == [4, 5, 6, 7, 8, 9]
    assert world.core.tables.episodes.counts[State.QUEUED] == 20
    world.take()
    world.train()
    assert [g.group for g in world.plans[2].groups] == [4, 5]


def test_f50_admission_reopens_when_an_update_is_acknowledged_whatever_still_runs() -> None:
    world = opened(places=100, staleness__max_age=0)
    node = world.nodes["rollout-0"]
    leases = list(node.leases.values())
    for lease in leases[:4]:
        world.delta(node, lease, reward=float(lease.grant.episode % 2))
        world.finish(node, lease)
    world.send(e.EvalStarted("slow", [task(1)], 0.0))
    world.take()
    world.train()
    assert not world.core.groups.live
    world.publish()
    world.sent()
    assert not world.core.groups.live, "not before the node runs the new weights"
    world.load(node)
    assert len(world.core.groups.live) == 2
    assert any(lease.grant.purpose == "eval" for lease in node.leases.values()), "a long episode is still running"


def test_admission_never_starts_more_than_the_remaining_steps_need() -> None:
    world = opened(steps=2, staleness__max_age=4)
    assert len(world.core.groups.live) == 4
    node = world.nodes["rollout-0"]
    world.fail(node, next(iter(node.leases.values())), "data")
    assert len(world.core.groups.live) == 4, "a failed group is replaced"
    world.drain(2)
    assert world.core.tables.episodes.counts[State.TRAINED] == 8 and not world.core.groups.live


def test_sync_waits_for_every_node_or_its_fence() -> None:
    world = opened(nodes=2, mode="sync", update__deadline_seconds=5.0)
    world.drain(1)
    world.publish()
    world.sent()
    first, second = world.nodes["rollout-0"], world.nodes["rollout-1"]
    world.load(first)
    assert not world.core.groups.live, "one node is not there yet"
    world.heard(first)
    world.heard(second)
    world.advance(6.0)
    assert second.fenced
    assert len(world.core.groups.live) == 2, "the update goes on without it"
    assert {lease.grant.purpose for lease in first.leases.values()} == {"train"}


def test_async_starts_groups_on_a_loaded_node_while_another_still_loads() -> None:
    world = opened(nodes=2, places=4, staleness__max_age=0)
    world.drain(1)
    world.publish()
    world.sent()
    world.load(world.nodes["rollout-0"])
    assert len(world.core.groups.live) == 1, "its share; the other half is kept for the node that still loads"
    assert not world.nodes["rollout-1"].leases, "the other node is still at step 0, too old for what would be trained at step 1"
    world.load(world.nodes["rollout-1"])
    assert len(world.core.groups.live) == 2


def test_nodes_that_load_one_after_the_other_share_what_may_begin() -> None:
    """Not all of it goes to the first that has loaded; a node that never loads keeps its share only until it is fenced."""
    world = opened(nodes=4, places=100, staleness__max_age=0, batch__groups=12, update__deadline_seconds=5.0)
    world.drain(1)
    world.publish()
    world.sent()
    for node, groups in zip(list(world.nodes.values())[:3], (3, 6, 9), strict=True):
        world.load(node)
        assert len(world.core.groups.live) == groups
    assert [len(node.leases) for node in world.nodes.values()] == [6, 6, 6, 0]
    for node in world.nodes.values():
        world.heard(node)
    world.advance(6.0)
    assert world.nodes["rollout-3"].fenced
    assert len(world.core.groups.live) == 12


def test_members_begin_only_on_nodes_new_enough_for_their_group() -> None:
    world = opened(nodes=2, places=1, staleness__max_age=0, update__rolling=0.5)
    world.drain(1)
    world.publish()
    world.sent()
    updated = next(node for node in world.nodes.values() if node.update is not None)
    world.load(updated)
    behind = next(node for node in world.nodes.values() if node is not updated)
    assert len(updated.leases) == 1 and not behind.leases
    assert world.core.tables.waiting.count == 1, "the second member waits although a place is free on the older node"
    world.settle_updates()
    assert len(behind.leases) == 1


def test_the_place_of_a_fallen_group_is_given_to_any_node() -> None:
    """Its own node waits for an update and takes nothing new; the other one has room and begins a group at once."""
    world = opened(nodes=2, places=8, staleness__max_age=1, update__inflight="episode", update__rolling=0.5)
    world.one_step()
    world.publish()
    closed = next(node for node in world.nodes.values() if node.update is not None)
    other = next(node for node in world.nodes.values() if node is not closed)
    elsewhere = {lease.grant.group for lease in other.leases.values()}
    victim = next(lease for lease in closed.leases.values() if lease.grant.group not in elsewhere)
    before = len(other.leases)
    world.fail(closed, victim, "data")
    assert len(other.leases) == before + 2


def test_tasks_are_asked_for_once_and_the_wait_is_named() -> None:
    world = World(make_config(), auto_tasks=False)
    world.join("rollout-0")
    world.update_all()
    out = world.send(e.TrainingOpened(100))
    assert [command for command in out if isinstance(command, c.NeedTasks)] == [c.NeedTasks(2)]
    assert world.core.waits_for() == "wait_prompts"
    again = world.send(e.NodeHeard("rollout-0", 1))
    assert not again
    world.send(e.TasksArrived([task(0)]))
    assert world.core.waits_for() == "wait_prompts", "one of the two is still to come"
    world.send(e.TasksArrived([task(1)]))
    assert world.core.waits_for() == "wait_capacity"


def test_nothing_is_admitted_before_there_are_weights_or_training_is_open() -> None:
    world = World(make_config())
    world.join("rollout-0")
    world.send(e.TrainingOpened(100))
    assert not world.core.groups.live
    other = World(make_config())
    other.join("rollout-0")
    other.update_all()
    assert not other.core.groups.live


def test_f49_the_queue_bound_acts_at_admission_alone() -> None:
    """A full queue refuses no finish, no delta and no park; it only starts nothing new."""
    world = opened(staleness__max_age=1, queue__groups=4, places=100)
    assert len(world.core.groups.live) == 4
    node = world.nodes["rollout-0"]
    for lease in list(node.leases.values()):
        world.delta(node, lease, reward=float(lease.grant.episode % 2))
        assert not any(isinstance(command, c.Refuse) for command in world.send(SliceUsed(*lease.key)))
        world.finish(node, lease)
    assert world.core.tables.episodes.counts[State.QUEUED] == 8
    assert not world.core.groups.live and not node.leases, "both batches are formed and wait for the learner"
    world.take()
    world.train()
    assert not world.core.groups.live, "room in the queue alone starts nothing: the node's weights are too old"
    world.update_all()
    assert len(world.core.groups.live) == 2
