"""What nodes say about episodes, checked: attempt, order, stamps, totals."""

from __future__ import annotations

import pytest
from core_world import ModelLease, ModelNode, World, make_config

from scheduler.core import commands as c
from scheduler.core import events as e
from segue.episode import State
from segue.ports.rollout import DeltaHead, Finish


@pytest.fixture
def one() -> tuple[World, ModelNode, ModelLease]:
    world = World(make_config(batch__groups=1, staleness__max_age=4))
    node = world.join("rollout-0", 2)
    world.update_all()
    world.send(e.TrainingOpened(1000))
    return world, node, node.leases[0]


One = tuple[World, ModelNode, ModelLease]


def head(lease: ModelLease, seq: int, *sampled: tuple[int, int], attempt: int | None = None) -> DeltaHead:
    return DeltaHead(lease.grant.episode, attempt or lease.grant.attempt, seq, 0, tuple(sampled))


def test_an_accepted_delta_answers_with_nothing(one: One) -> None:
    world, _, lease = one
    assert world.send(head(lease, 0, (0, 3))) == ()
    episode = world.core.tables.episodes.live[lease.grant.episode]
    assert (episode.next_seq, episode.versions, episode.counts) == (1, [0], [3])
    assert world.core.intake.tokens == 3


def test_a_repeated_delta_is_ignored_and_a_gap_asked_for(one: One) -> None:
    world, _, lease = one
    world.send(head(lease, 0, (0, 3)))
    assert world.send(head(lease, 0, (0, 3))) == (c.Ignore(lease.grant.episode, 0),)
    assert world.send(head(lease, 2, (0, 3))) == (c.Resend(*lease.key, seq=1),)
    assert world.core.intake.tokens == 3
    tally = world.core.tables.tally
    assert (tally["refused", "duplicate"], tally["refused", "gap"]) == (1, 1)


def test_another_attempt_is_refused(one: One) -> None:
    world, _, lease = one
    assert world.send(head(lease, 0, attempt=2)) == (c.Refuse(lease.grant.episode, 2),)
    assert world.send(DeltaHead(10_000, 1, 0, 0, ())) == (c.Refuse(10_000, 1),)


@pytest.mark.parametrize("sampled", [((7, 1),), ((-1, 1),), ((0, 0),), ((0, -2),), ((1, 1), (0, 1))])
def test_an_untrue_stamp_fails_the_attempt_and_is_not_accepted(one: One, sampled: tuple[tuple[int, int], ...]) -> None:
    """Never published, no tokens, or going back."""
    world, _, lease = one
    world.one_step()
    world.publish()
    lease = next(iter(world.nodes["rollout-0"].leases.values()))
    out = world.send(head(lease, 0, *sampled))
    assert out[0] == c.Refuse(*lease.key)
    assert any(isinstance(command, c.DropAttempt) for command in out)
    assert world.logs[lease.grant.episode] == []
    assert world.tally("attempts_failed", "infra", "bad_stamp") == 1
    assert world.core.tables.episodes.live[lease.grant.episode].resting, "and is tried again after a pause"


def test_versions_may_not_go_back_between_deltas_either(one: One) -> None:
    world, node, _ = one
    world.one_step()
    world.update_all()
    lease = next(iter(node.leases.values()))
    assert world.send(head(lease, 0, (0, 2), (1, 2))) == ()
    assert world.send(head(lease, 1, (1, 1))) == ()
    episode = world.core.tables.episodes.live[lease.grant.episode]
    assert (episode.versions, episode.counts) == ([0, 1], [2, 3])
    assert world.send(head(lease, 2, (0, 1)))[0] == c.Refuse(*lease.key)


@pytest.mark.parametrize("wrong", ["reward", "outcome", "count"])
def test_totals_that_do_not_fit_the_deltas_fail_the_attempt(one: One, wrong: str) -> None:
    world, node, lease = one
    world.delta(node, lease, reward=0.5)
    world.delta(node, lease, reward=0.25)
    finish = Finish(
        *lease.key,
        next_seq=1 if wrong == "count" else 2,
        outcome="vanished" if wrong == "outcome" else "terminated",
        turns=2,
        reward=0.8 if wrong == "reward" else 0.75,
        checksum=0,
        seconds=1.0,
    )
    world.send(finish)
    assert world.tally("attempts_failed", "infra", "bad_totals") == 1
    assert world.core.tables.episodes.live[lease.grant.episode].state is State.LEASED, "leased again"


def test_a_finish_in_front_of_its_deltas_is_asked_for_again(one: One) -> None:
    world, _, lease = one
    out = world.send(Finish(*lease.key, 3, "terminated", 1, 0.0, 0, 1.0))
    assert out == [c.Resend(*lease.key, seq=0)]
    assert world.core.tables.episodes.counts[State.ASSEMBLING] == 0


def test_f12_an_episode_counts_once_however_often_its_finish_arrives(one: One) -> None:
    world, node, lease = one
    world.delta(node, lease)
    world.finish(node, lease)
    out = world.send(world.finishes[lease.grant.episode])
    assert c.Refuse(*lease.key) in out
    assert world.tally("finished", "latency", "terminated") == 1
