"""Partial rollouts: who is parked for whom, and that a parked episode goes on."""

from __future__ import annotations

from core_world import ModelNode, World, make_config, task

from scheduler.core import commands as c
from scheduler.core import events as e
from segue.episode import State
from segue.ports.rollout import Parked, SliceUsed


def young_at_work_old_waiting() -> tuple[World, ModelNode, list[int]]:
    """The node of group 0 died: its two episodes wait while the other node is full of younger ones."""
    world = World(make_config(staleness__max_age=8))
    old = world.join("rollout-0", 2)
    world.update_all()
    world.send(e.TrainingOpened(100))
    node = world.join("rollout-1", 4)
    world.settle_updates()
    waiting = [lease.grant.episode for lease in old.leases.values()]
    for lease in list(old.leases.values()):
        world.delta(old, lease, tokens=5)
    del world.nodes["rollout-0"]
    world.send(e.NodeLost("rollout-0", old.session, "killed"))
    assert world.core.tables.waiting.count == 2 and len(node.leases) == 4
    return world, node, waiting


def test_an_episode_whose_slice_is_used_makes_room_for_an_older_group() -> None:
    world, node, waiting = young_at_work_old_waiting()
    leases = list(node.leases.values())
    for lease in leases:
        world.delta(node, lease, tokens=3)
        world.send(SliceUsed(*lease.key))
    parking = [lease for lease in leases if lease.park]
    assert len(parking) == 2, "two wait, so two are parked and not four"
    assert world.tally("slices_extended") == 2
    for lease in parking:
        world.park(node, lease)
    assert sorted(episode for episode in node.leases if episode in waiting) == sorted(waiting)
    assert world.core.tables.episodes.counts[State.PARKED] == 2
    assert all(node.leases[episode].seq == 1 for episode in waiting), "they go on from their deltas"


def test_a_parked_episode_is_leased_again_with_its_whole_log() -> None:
    world, node, waiting = young_at_work_old_waiting()
    lease = next(iter(node.leases.values()))
    world.delta(node, lease, tokens=3)
    world.send(SliceUsed(*lease.key))
    world.park(node, lease)
    for episode in waiting:
        while episode not in node.leases:
            world.finish(node, next(held for held in node.leases.values() if held.grant.episode not in waiting))
        world.finish(node, node.leases[episode])
    again = node.leases[lease.grant.episode]
    assert again.grant.attempt == lease.grant.attempt + 1
    assert (again.grant.next_seq, again.grant.seconds) == (1, 1.0)
    assert world.core.tables.episodes.counts[State.PARKED] == 0


def test_nobody_is_parked_when_nobody_more_urgent_waits() -> None:
    world = World(make_config(staleness__max_age=8))
    node = world.join("rollout-0", 4)
    world.update_all()
    world.send(e.TrainingOpened(100))
    for lease in list(node.leases.values()):
        out = world.send(SliceUsed(*lease.key))
        assert out == [c.ExtendSlice(node.name, node.session, *lease.key)]


def test_a_second_slice_report_while_a_park_is_under_way_changes_nothing() -> None:
    world, node, _ = young_at_work_old_waiting()
    lease = next(iter(node.leases.values()))
    assert any(isinstance(command, c.ParkAttempt) for command in world.send(SliceUsed(*lease.key)))
    assert not world.send(SliceUsed(*lease.key))
    assert world.core.tables.parks_ordered == 1
    world.finish(node, lease)
    assert world.core.tables.parks_ordered == 0, "it finished instead: the order is void"


def test_a_gap_in_front_of_a_park_is_asked_for_and_the_lease_stays() -> None:
    world, node, _ = young_at_work_old_waiting()
    lease = next(iter(node.leases.values()))
    world.send(SliceUsed(*lease.key))
    out = world.send(Parked(*lease.key, next_seq=2, seconds=1.0))
    assert c.Resend(*lease.key, seq=0) in out
    assert world.core.tables.episodes.live[lease.grant.episode].state is State.LEASED


def test_evaluation_makes_training_episodes_park() -> None:
    world = World(make_config(staleness__max_age=8))
    node = world.join("rollout-0", 2)
    world.update_all()
    world.send(e.TrainingOpened(100))
    world.send(e.EvalStarted("now", [task(5)], 0.0))
    lease = next(iter(node.leases.values()))
    world.send(SliceUsed(*lease.key))
    assert lease.park
    world.park(node, lease)
    assert any(held.grant.purpose == "eval" for held in node.leases.values())
