"""Batches: ages at formation, the three over-age policies, the order of steps, and what the learner may say about them."""

from __future__ import annotations

import pytest
from core_world import ModelNode, World, make_config, task

from scheduler.core import events as e
from segue.episode import DropReason, State


def slow_and_fast(bound: int = 1, policy: str = "mask", size: int = 2) -> tuple[World, ModelNode, ModelNode]:
    """Group 0 sits on the slow node; the fast one trains step after step. Batches of one group."""
    world = World(make_config(batch__groups=1, group__size=size, staleness__max_age=bound, staleness__over_age=policy))
    slow = world.join("rollout-0", size)
    world.update_all()
    world.send(e.TrainingOpened(100))
    assert {lease.grant.group for lease in slow.leases.values()} == {0}
    for lease in list(slow.leases.values()):
        world.delta(slow, lease, tokens=10)
    fast = world.join("rollout-1", size)
    world.settle_updates()
    return world, slow, fast


def fast_steps(world: World, fast: ModelNode, count: int) -> None:
    for _ in range(count):
        step = world.trained
        while step not in world.plans:
            lease = next(iter(fast.leases.values()))
            world.delta(fast, lease, reward=float(lease.grant.episode % 2))
            world.finish(fast, lease)
        world.take()
        world.train()
        world.update_all()


def test_f02_f03_tokens_too_old_at_formation_are_masked_and_fresh_ones_train() -> None:
    """Admitted in time, then slowed down: queue and pause time count, because age is the step trained minus the step sampled."""
    world, slow, fast = slow_and_fast()
    fast_steps(world, fast, 2)
    for lease in list(slow.leases.values()):
        world.delta(slow, lease, tokens=3, reward=float(lease.grant.episode % 2))
        world.finish(slow, lease)
    plan = next(plan for plan in world.plans.values() if any(g.group == 0 for g in plan.groups))
    assert plan.step >= 2
    assert (plan.trainable, plan.over_age) == (6, 20)
    assert [m.reward for m in plan.groups[0].members] == [0.0, 1.0], "rewards stay in the baseline"


def test_a_group_without_a_trainable_token_is_dropped_before_its_batch_is_formed() -> None:
    world, slow, fast = slow_and_fast()
    fast_steps(world, fast, 2)
    for lease in list(slow.leases.values()):
        world.delta(slow, lease, tokens=0, reward=float(lease.grant.episode % 2))
        world.finish(slow, lease)
    assert world.core.tables.episodes.dropped[DropReason.STALE, "queue"] == 2
    assert not any(g.group == 0 for plan in world.plans.values() for g in plan.groups)
    fast_steps(world, fast, 2)


def test_f09_only_the_over_age_episode_leaves_the_loss() -> None:
    """One member is far slower than the rest: under `mask` the group still ships with every reward."""
    world, slow, fast = slow_and_fast(size=3)
    first, *others = list(slow.leases.values())
    fast_steps(world, fast, 2)
    world.delta(slow, first, tokens=0)
    world.finish(slow, first)
    for lease in others:
        world.delta(slow, lease, tokens=2, reward=1.0)
        world.finish(slow, lease)
    plan = next(plan for plan in world.plans.values() if any(g.group == 0 for g in plan.groups))
    assert len(plan.groups[0].members) == 3
    assert (plan.trainable, plan.over_age) == (4, 30)


def test_policy_drop_ends_over_age_episodes_in_flight_and_replaces_their_group() -> None:
    """F08: not restarted at once; the freed place is paced by admission like any other."""
    world, slow, fast = slow_and_fast(policy="drop")
    fast_steps(world, fast, 1)
    assert any(lease.grant.group == 0 for lease in slow.leases.values()), "age 1 is within the bound"
    fast_steps(world, fast, 1)
    assert not any(lease.grant.group == 0 for lease in slow.leases.values())
    assert world.core.tables.episodes.dropped[DropReason.STALE, "rollout"] == 2
    world.drain(2)


def test_policy_drop_keeps_the_group_if_enough_members_are_young() -> None:
    world = World(make_config(batch__groups=1, group__size=4, staleness__max_age=1, staleness__over_age="drop"))
    slow = world.join("rollout-0", 4)
    world.update_all()
    world.send(e.TrainingOpened(100))
    old, *young = list(slow.leases.values())
    world.delta(slow, old, tokens=10)
    fast = world.join("rollout-1", 4)
    world.settle_updates()
    fast_steps(world, fast, 2)
    assert world.core.tables.episodes.dropped[DropReason.STALE, "rollout"] == 1
    for lease in young:
        world.delta(slow, lease, tokens=1, reward=float(lease.grant.member))
        world.finish(slow, lease)
    plan = next(plan for plan in world.plans.values() if any(g.group == 0 for g in plan.groups))
    assert len(plan.groups[0].members) == 3 and plan.over_age == 0


def test_policy_drop_also_meets_tokens_that_are_over_age_when_they_are_sampled() -> None:
    """The node was leased the group in time, did nothing for two steps, and then one member sampled under weights too old."""
    world = World(make_config(batch__groups=1, staleness__max_age=1, staleness__over_age="drop"))
    slow = world.join("rollout-0", 2)
    world.update_all()
    world.send(e.TrainingOpened(100))
    fast = world.join("rollout-1", 2)
    world.settle_updates()
    fast_steps(world, fast, 2)
    for lease, version in zip(list(slow.leases.values()), (0, 2), strict=True):
        slow.version = version
        world.delta(slow, lease, tokens=3, reward=float(lease.grant.episode % 2))
        world.finish(slow, lease)
    assert not any(g.group == 0 for plan in world.plans.values() for g in plan.groups)
    assert sum(n for (reason, _), n in world.core.tables.episodes.dropped.items() if reason is DropReason.STALE) == 2


def test_a_ready_group_that_loses_a_member_ships_once_and_without_it() -> None:
    """Only a rollback can make a member of a ready group too old; the group must not become ready a second time."""
    world = World(make_config(batch__groups=2, group__size=4, staleness__over_age="drop"))
    node = world.join("rollout-0", 8)
    world.update_all()
    world.send(e.TrainingOpened(100))
    first, second = ([lease for lease in node.leases.values() if lease.grant.group == g] for g in (0, 1))
    for lease in first:
        world.delta(node, lease, reward=float(lease.grant.member))
        world.finish(node, lease)
    core = world.core
    core.groups.drop_member(core.groups.live[0].members[2], DropReason.STALE, world.now)
    assert [group for group, _ in core.groups.ready] == [0]
    for lease in second:
        world.delta(node, lease, reward=float(lease.grant.member))
        world.finish(node, lease)
    assert [[m.member for m in g.members] for g in world.plans[0].groups] == [[0, 1, 3], [0, 1, 2, 3]]


def test_evaluation_has_no_age() -> None:
    world, slow, fast = slow_and_fast(policy="drop")
    world.send(e.EvalStarted("slow", [task(9)], 0.0))
    for lease in list(slow.leases.values()):
        world.finish(slow, lease)
    (lease,) = [lease for lease in slow.leases.values() if lease.grant.purpose == "eval"]
    world.delta(slow, lease, tokens=5)
    fast_steps(world, fast, 4)
    assert slow.leases[lease.grant.episode] is lease


def test_policy_train_takes_everything_and_says_how_much_was_over_age() -> None:
    world, slow, fast = slow_and_fast(policy="train")
    fast_steps(world, fast, 2)
    for lease in list(slow.leases.values()):
        world.finish(slow, lease)
    plan = next(plan for plan in world.plans.values() if any(g.group == 0 for g in plan.groups))
    assert (plan.trainable, plan.over_age) == (0, 20)
    assert world.tally("tokens_over_age") == 20


def test_f06_age_is_computed_from_steps_not_counted_up() -> None:
    """Updates that are skipped, repeated or republished do not age anything."""
    world, slow, fast = slow_and_fast(bound=2)
    for _ in range(5):
        world.publish()
    fast_steps(world, fast, 1)
    for lease in list(slow.leases.values()):
        world.delta(slow, lease, tokens=1, reward=float(lease.grant.episode % 2))
        world.finish(slow, lease)
    plan = next(plan for plan in world.plans.values() if any(g.group == 0 for g in plan.groups))
    assert plan.over_age == 0


@pytest.mark.parametrize("prefetch", [0, 1, 2])
def test_at_most_one_and_prefetch_batches_are_formed_ahead(prefetch: int) -> None:
    world = World(make_config(staleness__max_age=3, data__prefetch=prefetch))
    node = world.join("rollout-0", 100)
    world.update_all()
    world.send(e.TrainingOpened(100))
    for lease in list(node.leases.values()):
        world.delta(node, lease, reward=float(lease.grant.episode % 2))
        world.finish(node, lease)
    assert len(world.plans) == 1 + prefetch
    world.take()
    world.train()
    assert len(world.plans) == 2 + prefetch


def test_delivered_trained_committed() -> None:
    world = World(make_config())
    world.join("rollout-0")
    world.send(e.TrainingOpened(100))
    world.drain(2)
    counts = world.core.tables.episodes.counts
    while 2 not in world.plans:
        world.serve()
    queued = counts[State.QUEUED]
    world.take()
    assert counts[State.DELIVERED] == 4 and counts[State.QUEUED] == queued - 4
    world.take()
    assert counts[State.DELIVERED] == 4, "asking again changes nothing"
    trained = counts[State.TRAINED]
    world.train()
    assert counts[State.TRAINED] == trained + 4
    assert not world.core.handle(e.BatchTrained(2), world.now), "a repeated report changes nothing"
    assert world.core.progress.trained == 3 and world.tally("refused", "duplicate") == 1
    assert world.released == set()
    world.commit()
    assert world.released == {0, 1, 2}


def test_reports_that_cannot_be_are_refused() -> None:
    world = World(make_config())
    world.join("rollout-0")
    world.send(e.TrainingOpened(100))
    world.drain(1)
    while 1 not in world.plans:
        world.serve()
    for event in (e.BatchTaken(0), e.BatchTaken(5), e.BatchTrained(2), e.BatchTrained(1), e.BatchesCommitted(2)):
        with pytest.raises(ValueError):
            world.core.handle(event, world.now)
    with pytest.raises(ValueError, match="weights of step 5"):
        world.core.handle(e.WeightsReady(5, "here"), world.now)


def test_a_group_that_sampled_nothing_is_never_delivered() -> None:
    world = World(make_config(batch__groups=1))
    node = world.join("rollout-0", 2)
    world.update_all()
    world.send(e.TrainingOpened(100))
    for lease in list(node.leases.values()):
        world.delta(node, lease, tokens=0, reward=float(lease.grant.episode % 2))
        world.finish(node, lease)
    assert not world.plans
    assert world.core.tables.episodes.dropped[DropReason.GROUP_FAILED, "queue"] == 2
    world.drain(1)


@pytest.mark.parametrize("steps", [1, 2, 3, 5])
@pytest.mark.parametrize("bound", [1, 2])
@pytest.mark.parametrize("policy", ["mask", "drop", "train"])
def test_a_straggler_whose_group_is_overtaken_is_over_age_exactly_beyond_the_bound(policy: str, bound: int, steps: int) -> None:
    """F02, F05: it samples, `steps` batches of others are trained, it ends. `World` counts the ages of every batch itself."""
    world = World(make_config(steps=30, group__size=2, batch__groups=1, staleness__max_age=bound, staleness__over_age=policy))
    node = world.join("rollout-0", 6)
    world.update_all()
    world.send(e.TrainingOpened(30))
    while not node.leases:
        assert world.serve()
    lease = next(iter(node.leases.values()))
    world.delta(node, lease, tokens=2)
    world.held = lease.grant.episode
    while world.trained < steps:
        assert world.serve(), "the others go on without it"
    world.held = -1
    if node.leases.get(lease.grant.episode) is lease:
        world.delta(node, lease, tokens=1)
        if node.leases.get(lease.grant.episode) is lease:
            world.finish(node, lease)
    world.drain(3)
    assert (sum(plan.over_age for plan in world.plans.values()) > 0) == (steps > bound and policy != "drop")
