"""What must not grow, add up or be taken for something else in a run of days."""

from __future__ import annotations

import pytest
from core_world import ModelLease, ModelNode, World, make_config

from scheduler.core import events as e
from segue import wire
from segue.episode import DropReason
from segue.ports.rollout import DeltaHead, Paused, Resumed


def one_node(places: int, **sections: object) -> tuple[World, ModelNode]:
    world = World(make_config(**sections))
    node = world.join("rollout-0", places)
    world.update_all()
    world.send(e.TrainingOpened(1000))
    return world, node


def sample_part(world: World, node: ModelNode, lease: ModelLease, complete: bool = False) -> None:
    """A piece of an action, or its end."""
    head = DeltaHead(*lease.key, lease.seq, lease.turn + 1, ((node.version, 2),), pending_action=complete)
    lease.seq += 1
    world.send(head)


def test_what_waits_for_its_group_is_forgotten_when_it_waits_no_more() -> None:
    """Members that wait are also noted at their group's node, which never looks there while nobody else's group is in line."""
    world, _ = one_node(4, batch__groups=2, group__size=8, staleness__max_age=1)
    noted = []
    for _ in range(12):
        world.one_step()
        world.update_all()
        noted.append(sum(len(node.mates) for node in world.core.tables.nodes))
    assert max(noted[6:]) <= max(noted[:6]) <= 32


def test_failures_of_the_machinery_add_up_only_in_a_row() -> None:
    """A task that was trained in between did not keep failing: over many epochs chance would set every task aside."""
    world, node = one_node(2, batch__groups=1, staleness__max_age=0, scheduler__retries_infra=0)
    again = world.core.groups.again
    task = node.leases[0].grant.task
    for _ in range(5):
        assert next(iter(node.leases.values())).grant.task == task
        world.fail(node, next(iter(node.leases.values())))
        assert next(iter(node.leases.values())).grant.task == task, "issued again"
        again.append(task)
        world.one_step()
        world.update_all()
    assert not world.core.failures.quarantined and not world.core.failures.strikes


def test_reasons_of_beginning_anew_are_bounded() -> None:
    world, node = one_node(2, batch__groups=1, staleness__max_age=0, scheduler__max_quarantined=1000)
    for number in range(100):
        lease = next(iter(node.leases.values()))
        world.delta(node, lease)
        world.fail(node, lease, "env", "crash")
        world.fail(node, node.leases[lease.grant.episode], "env", f"reason {number}")
        world.rest()
        world.fail(node, node.leases[lease.grant.episode], "env", "crash")
    assert len(world.core.tables.tally.under("regenerated")) <= 65


@pytest.mark.parametrize("reason", ["checksum", "not_resumable"])
def test_a_log_that_cannot_be_gone_on_with_is_discarded(reason: str) -> None:
    world, node = one_node(2, batch__groups=1, staleness__max_age=0)
    lease = node.leases[0]
    world.delta(node, lease, tokens=5)
    world.fail(node, lease, "infra", reason)
    world.rest()
    assert (node.leases[0].seq, node.leases[0].grant.attempt) == (0, 2)
    assert world.tally("regenerated", reason) == 1 and world.tally("tokens_discarded") == 5


def test_an_action_that_a_lost_node_leaves_half_done_counts_as_paused_once() -> None:
    world = World(make_config(batch__groups=1, staleness__max_age=3))
    first, second = world.join("rollout-0", 2), world.join("rollout-1", 8)
    world.update_all()
    world.send(e.TrainingOpened(1000))
    half, told = first.leases.values()
    sample_part(world, first, half)
    sample_part(world, first, told)
    world.send(Paused(*told.key, "update"))
    world.send(e.NodeLost("rollout-0", first.session, "killed"))
    assert (world.tally("paused", "migration"), world.tally("paused", "update")) == (1, 1)
    for lease in (half, told):
        world.send(Resumed(lease.grant.episode, 2))
    assert world.tally("resumed") == 2
    again = second.leases[half.grant.episode]
    sample_part(world, second, again, complete=True)
    world.fail(second, again, "env", "crash")
    assert world.tally("paused", "migration") == 1, "its action was complete: no request ended before its turn did"


def test_outcomes_that_the_learner_masks_are_no_trainable_tokens() -> None:
    """A group in which nothing else is left is dropped before its batch is formed: it would be a hole in the batch."""
    world, node = one_node(
        6, batch__groups=1, group__size=3, staleness__max_age=1, learner__mask_outcomes=["truncated_wall"]
    )  # fmt: skip
    for lease in [lease for lease in node.leases.values() if lease.grant.group == 0]:
        masked = lease.grant.member == 0
        world.delta(node, lease, tokens=1 if masked else 0, reward=float(lease.grant.member))
        world.finish(node, lease, outcome="truncated_wall" if masked else "terminated")
    assert not world.plans
    assert world.core.tables.episodes.dropped[DropReason.GROUP_FAILED, "queue"] == 3
    world.one_step()
    assert [group.group for group in world.plans[0].groups] == [1]


@pytest.mark.parametrize("policy", ["mask", "drop"])
def test_neither_the_version_table_nor_the_cut_grows_with_the_run(policy: str) -> None:
    world, _ = one_node(16, batch__groups=2, staleness__max_age=3, staleness__over_age=policy)
    sizes = []
    for _ in range(60):
        world.one_step()
        world.update_all()
        world.commit()
        assert world.cut is not None
        sizes.append((len(world.core.tables.versions), len(world.cut.versions), len(wire.encode(world.core.cut()))))
    assert max(versions for versions, _, _ in sizes) <= 3 + 1 + 4, "the bound on the age, and the batches not yet trained"
    assert max(versions for _, versions, _ in sizes) <= 3 + 1 + 4
    assert max(nbytes for _, _, nbytes in sizes[30:]) <= max(nbytes for _, _, nbytes in sizes[10:30]) + 20


def test_versions_are_known_as_long_as_anything_that_lives_may_name_them() -> None:
    """An episode that began at the start and says nothing for long; an evaluation; a batch that is not committed."""
    world, node = one_node(20, batch__groups=1, staleness__max_age=10)
    silent = min(node.leases.values(), key=lambda lease: lease.grant.group)
    del node.leases[silent.grant.episode]
    for _ in range(5):
        world.one_step()
        world.update_all()
    assert 0 in world.core.tables.versions
    node.leases[silent.grant.episode] = silent
    head = DeltaHead(*silent.key, silent.seq, 0, ((0, 2), (5, 1)), record=True)
    silent.seq, silent.turn = silent.seq + 1, 0
    world.send(head)
    assert world.logs[silent.grant.episode], "what it sampled under the first version is accepted"
    world.finish(node, silent)
    world.drain(10)
    assert 0 in world.core.tables.versions, "its batch may be asked for until it is committed"
    world.commit()
    world.drain(1)
    world.commit()
    assert 0 not in world.core.tables.versions
