"""What the scheduler shows of its queues, and what a lease's token slice means at the shell."""

from __future__ import annotations

import asyncio
from pathlib import Path

from core_world import World, make_config
from shell_world import ShellWorld, run
from test_shell_protocol import Hand, delta, finish, ready

from scheduler.core import events as e
from segue.episode import DropReason
from segue.metrics import vocabulary as words
from segue.ports import driver as driver_port
from segue.ports import rollout as rollout_port
from segue.ports.rpc import ask


def newest(hand: Hand) -> rollout_port.Order:
    return hand.orders[-1]


def test_queue_depths_are_reported_as_they_are(tmp_path: Path) -> None:
    """The learner takes nothing: one batch and the one ahead are formed, and what else may begin is ready and waits."""

    async def course() -> None:
        world = ShellWorld(tmp_path, steps=100, staleness__max_age=3)
        await world.start()
        await world.learner.publish()
        await asyncio.sleep(60.0)
        status = await world.status()
        assert {name: status["queue"][name] for name in ("pending", "ready", "batches")} == {
            "pending": 0,
            "ready": 4,
            "batches": 2,
        }
        assert {name: world.metrics.value("segue_queue_depth", queue=name) for name in words.QUEUES["scheduler"]} == {
            "pending": 0, "ready": 4, "batches": 2
        }  # fmt: skip
        assert world.metrics.value("segue_queue_capacity", queue="ready") == 8
        await world.learner.train(3)
        await world.stop()

    run(course)


def test_a_group_that_was_dropped_or_chosen_already_is_counted_as_what_it_is() -> None:
    world = World(make_config(batch__groups=3, staleness__max_age=0))
    node = world.join("rollout-0", 6)
    world.update_all()
    world.send(e.TrainingOpened(100))
    for number in (0, 1):
        for lease in [lease for lease in node.leases.values() if lease.grant.group == number]:
            world.delta(node, lease, reward=float(lease.grant.member))
            world.finish(node, lease)
    assert world.core.batches.ready == 2
    world.core.groups.drop(world.core.groups.live[0], DropReason.STALE)
    assert world.core.batches.ready == 1


def test_every_reason_of_the_catalogue_can_happen() -> None:
    """A row that nobody sets tells a reader that something never happened, where it was never looked for."""
    assert words.PAUSE_REASONS == ("update", "slice", "migration")
    assert words.MIGRATION_REASONS == ("node_lost", "fenced", "failed", "parked")
    assert words.DROP_REASONS == ("stale", "zero_variance", "group_failed", "redundant", "shutdown")


def test_a_used_slice_is_extended_by_another_or_the_episode_is_parked_for_somebody_else(tmp_path: Path) -> None:
    """`rollout.slice_tokens` goes with every training lease and every extension; evaluation has no slices."""

    async def course() -> None:
        world, hand = await ready(tmp_path, rollout__slice_tokens=100, rollout__max_episodes=4)
        first, *_, last = hand.leases()
        assert (first.group, last.group) == (0, 1) and first.slice_tokens == last.slice_tokens == 100
        await hand.say(delta(last, 0), rollout_port.SliceUsed(last.episode, last.attempt))
        assert newest(hand) == rollout_port.Extend(last.episode, last.attempt, 100), "nobody waits"
        evaluation = world.shell._stream.take(1)
        await ask(world.driver, driver_port.START_EVAL, driver_port.StartEval("beside", evaluation, 0.0), 10.0)
        await hand.say(rollout_port.SliceUsed(last.episode, last.attempt))
        assert newest(hand) == rollout_port.ParkOrder(last.episode, last.attempt), (
            "the evaluation comes first, and waits for a place"
        )
        await hand.say(rollout_port.Parked(last.episode, last.attempt, 1, 2.5))
        beside = hand.leases()[-1]
        assert (beside.purpose, beside.slice_tokens) == ("eval", 0)
        await hand.say(finish(first, []))
        again = hand.leases()[-1]
        assert (again.episode, again.attempt, again.slice_tokens, again.snapshot.seconds) == (last.episode, 2, 100, 2.5)
        await world.stop()

    run(course)
