"""Faults of other systems that no other test of the scheduler meets head on (docs/faults.md)."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from core_world import ModelLease, ModelNode, World, make_config
from shell_world import ShellWorld, run

from scheduler.core import events as e
from segue.clock import now
from segue.episode import DropReason
from segue.ports import driver as driver_port
from segue.ports import learner as learner_port
from segue.ports.rpc import ask


def one_group_aside(**sections: object) -> tuple[World, ModelNode, ModelLease, ModelLease]:
    """Batches of one group of two. Group 0 began on a node of its own; another node is there for what goes on beside it."""
    world = World(make_config(batch__groups=1, **sections))
    node = world.join("rollout-0", 2)
    world.update_all()
    world.send(e.TrainingOpened(100))
    first, second = node.leases.values()
    world.join("rollout-1", 2)
    world.settle_updates()
    return world, node, first, second


def train(world: World) -> None:
    """Other groups fill the next batch; it is trained, and its weights reach every node."""
    while world.trained not in world.plans:
        pairs = [(node, lease) for node in world.nodes.values() for lease in node.leases.values() if lease.grant.group]
        node, lease = pairs[0]
        world.delta(node, lease, reward=float(lease.grant.member))
        world.finish(node, lease)
    world.take()
    world.train()
    world.update_all()


def test_f03_who_waits_finished_grows_old_like_who_still_runs() -> None:
    """One member finished at step 0 and waited for its mate through two updates: its tokens are two steps old."""
    world, node, early, late = one_group_aside(staleness__max_age=1)
    world.delta(node, early, tokens=10, reward=1.0)
    world.finish(node, early)
    train(world)
    train(world)
    world.delta(node, late, tokens=3)
    world.finish(node, late)
    plan = next(plan for plan in world.plans.values() if any(group.group == 0 for group in plan.groups))
    assert plan.step == 2
    assert (plan.trainable, plan.over_age) == (3, 10), "the ten were sampled under weights of step 0 and never touched again"
    assert [member.reward for member in plan.groups[0].members] == [1.0, 0.0]


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_f06_age_grows_by_one_with_every_step_and_not_with_every_version(steps: int) -> None:
    """Up to the bound of two steps and not one update earlier, although each step's weights are published three times."""
    world, node, first, second = one_group_aside(staleness__max_age=2)
    for lease in (first, second):
        world.delta(node, lease, tokens=10)
    for _ in range(steps):
        train(world)
        world.publish()
        world.publish()
    for lease in (first, second):
        world.delta(node, lease, tokens=1, reward=float(lease.grant.member))
        world.finish(node, lease)
    plan = next(plan for plan in world.plans.values() if any(group.group == 0 for group in plan.groups))
    assert plan.step == steps and plan.over_age == (20 if steps > 2 else 0)


def test_f07_going_on_keeps_every_span_and_beginning_anew_keeps_nothing() -> None:
    """The two ways in which an interrupted episode comes back: each token judged by its own version, or no old token at all."""
    world, node, on, anew = one_group_aside(staleness__max_age=1, scheduler__retries_infra=3)
    world.delta(node, anew, tokens=5)
    world.delta(node, on, tokens=4, record=False)
    train(world)
    world.delta(node, on, tokens=4, record=False)
    world.fail(node, anew, "infra", "checksum")
    assert world.logs[anew.grant.episode] == [] and world.tally("tokens_discarded") == 5
    assert world.core.tables.episodes.live[anew.grant.episode].versions == []
    world.rest(3.0)
    train(world)
    world.delta(node, on, tokens=4, reward=1.0)
    world.finish(node, on)
    node, again = next((n, n.leases[anew.grant.episode]) for n in world.nodes.values() if anew.grant.episode in n.leases)
    assert (again.grant.attempt, again.grant.next_seq, again.grant.turn) == (2, 0, -1)
    world.delta(node, again, tokens=6)
    world.finish(node, again)
    plan = next(plan for plan in world.plans.values() if any(group.group == 0 for group in plan.groups))
    assert plan.step == 2 and plan.versions == [0, 1, 2]
    assert (plan.trainable, plan.over_age) == (4 + 4 + 6, 4), "only the first span of the one that went on is over age"


def test_f08_what_went_over_age_is_not_begun_again() -> None:
    """Its task would go over age again, at the cost of all others: the place goes to the next task of the stream."""
    world, node, first, second = one_group_aside(staleness__max_age=1, staleness__over_age="drop")
    for lease in (first, second):
        world.delta(node, lease, tokens=10)
    train(world)
    train(world)
    assert world.core.tables.episodes.dropped[DropReason.STALE, "rollout"] == 2
    waiting = [task.id for task in (*world.core.admission.tasks, *world.core.groups.again)]
    assert first.grant.task.id not in [*waiting, *(group.task.id for group in world.core.groups.live.values())]
    assert len(world.core.groups.live) == 2, "and the place is used"


def test_f48_what_a_batch_does_not_need_stays_for_those_that_follow() -> None:
    """Five batches' worth of groups finishes before the first is taken: each is trained once, in order, at its age by then."""
    world = World(make_config(staleness__max_age=4))
    node = world.join("rollout-0", 100)
    world.update_all()
    world.send(e.TrainingOpened(100))
    for lease in list(node.leases.values()):
        world.delta(node, lease, tokens=3, reward=float(lease.grant.member))
        world.finish(node, lease)
    for step in range(5):
        assert [group.group for group in world.plans[step].groups] == [2 * step, 2 * step + 1]
        assert (world.plans[step].trainable, world.plans[step].over_age) == (12, 0)
        world.take()
        world.train()


def test_f57_a_wake_up_that_is_meant_for_others_ends_no_wait_and_none_is_missed(tmp_path: Path) -> None:
    """Each waiter looks again after every wake: it neither returns empty-handed nor spins; and what comes wakes all of them."""

    async def course() -> None:
        world = ShellWorld(tmp_path)
        await world.shell.start()
        await ask(world.driver, driver_port.OPEN_TRAINING, driver_port.OpenTraining(100), 10.0)
        looks = 0
        until = world.shell._until

        async def counting(ready: object, seconds: float) -> bool:
            def look() -> bool:
                nonlocal looks
                looks += 1
                return bool(ready())  # type: ignore[operator]

            return await until(look, seconds)

        world.shell._until = counting  # type: ignore[method-assign]
        began = now()
        waiters = [
            asyncio.create_task(ask(world.driver, learner_port.TAKE_BATCH, learner_port.TakeBatch(0, r, 7.5), 99.0))
            for r in range(3)
        ]
        for _ in range(5):
            await asyncio.sleep(1.0)
            world.shell.wake()
        assert {reply.batch for reply in await asyncio.gather(*waiters)} == {None}
        assert now() - began == pytest.approx(7.5)
        assert looks <= 3 * (1 + 5 + 1), "one look per wake and waiter"
        for node in world.nodes:
            node.start()
        waiters = [
            asyncio.create_task(ask(world.driver, learner_port.TAKE_BATCH, learner_port.TakeBatch(0, r, 1e6), 2e6))
            for r in range(3)
        ]
        await world.learner.publish()
        assert all(reply.batch is not None for reply in await asyncio.gather(*waiters))
        assert now() - began < 100.0
        await world.stop()

    run(course)


@pytest.mark.parametrize(("turns", "filtered"), [(((0.25, 0.75), (1.0, 0.0)), True), (((0.5, 0.5), (0.5,)), False)])
def test_f66_equal_rewards_are_those_of_episodes_not_of_their_turns(turns: tuple[tuple[float, ...], ...], filtered: bool) -> None:
    """Turns of different rewards can make equal returns, and turns of equal rewards different ones."""
    world, node, *leases = one_group_aside(staleness__max_age=4, group__filter_zero_variance=True)
    for lease, rewards in zip(leases, turns, strict=True):
        for reward in rewards:
            world.delta(node, lease, reward=reward)
        world.finish(node, lease)
    assert world.core.tables.episodes.dropped[DropReason.ZERO_VARIANCE, "queue"] == (2 if filtered else 0)
    assert any(group.group == 0 for plan in world.plans.values() for group in plan.groups) is not filtered


@pytest.mark.parametrize("bound", [0, 1, 4])
def test_f90_a_resumed_run_has_the_room_of_one_that_never_stopped(bound: int) -> None:
    """However many steps were trained before, η + 1 batches may be begun and not one group more."""
    world = World(make_config(staleness__max_age=bound))
    world.join("rollout-0", 200)
    world.update_all()
    world.send(e.TrainingOpened(1000))
    while world.trained < 7:
        world.one_step()
        world.update_all()
    ahead = world.core.progress.formed * 2 + len(world.core.groups.live)
    assert ahead == (bound + 7 + 1) * 2
    world.crash_and_resume()
    world.join("rollout-0", 200)
    assert not world.core.groups.live, "nothing before the restored weights are published"
    world.update_all()
    assert world.core.progress.formed == 7 and len(world.core.groups.live) == (bound + 1) * 2
    world.drain(3)
