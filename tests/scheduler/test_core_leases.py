"""Leases: routing, priority, and every way in which the right to run an episode ends."""

from __future__ import annotations

from collections import Counter

from core_world import ModelLease, ModelNode, World, make_config, task

from scheduler.core import events as e
from scheduler.core.leases import progress_seconds
from segue.episode import State
from segue.ports.rollout import Discarded, SliceUsed


def opened(places: list[int], **sections: object) -> World:
    world = World(make_config(staleness__max_age=8, **sections))
    for index, count in enumerate(places):
        world.join(f"rollout-{index}", count)
    world.update_all()
    world.send(e.TrainingOpened(1000))
    return world


def by_node(world: World) -> dict[str, list[int]]:
    return {name: sorted(lease.grant.group for lease in node.leases.values()) for name, node in world.nodes.items()}


def test_group_mates_begin_together_until_the_balance_is_off() -> None:
    world = opened([32, 32], group__size=8, batch__groups=1)
    homes = {group: Counter(name for name, held in by_node(world).items() for g in held if g == group) for group in range(4)}
    assert [max(count.values()) for count in homes.values()] == [8, 8, 8, 8], "every group begins on one node"
    assert {name: len(node.leases) for name, node in world.nodes.items()} == {"rollout-0": 32, "rollout-1": 32}


def test_affinity_yields_when_its_node_is_much_fuller() -> None:
    world = opened([4, 4], group__size=4)
    assert by_node(world) == {"rollout-0": [0, 0, 0, 1], "rollout-1": [0, 1, 1, 1]}


def parked_one(**sections: object) -> tuple[World, ModelNode, ModelNode, ModelLease]:
    """Two full nodes; an evaluation had one episode of the first node parked, with its evaluation episode in its place."""
    world = opened([4, 4], group__size=4, batch__groups=8, **sections)
    first, second = world.nodes["rollout-0"], world.nodes["rollout-1"]
    world.send(e.EvalStarted("now", [task(5)], 0.0))
    lease = next(iter(first.leases.values()))
    world.delta(first, lease, tokens=3)
    world.send(SliceUsed(*lease.key))
    assert lease.park
    world.park(first, lease)
    assert any(held.grant.purpose == "eval" for held in first.leases.values())
    return world, first, second, lease


def test_a_parked_episode_waits_for_the_node_that_has_its_prefix() -> None:
    """Another node that gets a free place begins something else: the parked one would have to be computed again there."""
    world, first, second, lease = parked_one()
    world.finish(second, next(iter(second.leases.values())))
    assert lease.grant.episode not in second.leases and len(second.leases) == 4
    world.finish(first, next(held for held in first.leases.values() if held.grant.purpose == "train"))
    assert first.leases[lease.grant.episode].grant.attempt == 2
    assert world.tally("migrated", "parked") == 0


def test_a_parked_episode_does_not_wait_for_a_home_that_is_much_fuller() -> None:
    """It is full, and the other has one place of four free."""
    world, first, second, lease = parked_one(scheduler__affinity_slack=0.2)
    world.finish(second, next(iter(second.leases.values())))
    assert lease.grant.episode in second.leases and lease.grant.episode not in first.leases
    assert world.tally("migrated", "parked") == 1


def test_without_affinity_the_next_free_place_is_anybodys() -> None:
    world = opened([8, 8], group__size=4, scheduler__affinity=False)
    assert by_node(world) == {"rollout-0": [0, 0, 1, 1, 2, 2, 3, 3], "rollout-1": [0, 0, 1, 1, 2, 2, 3, 3]}
    world = opened([8, 8], group__size=4, scheduler__affinity_slack=0.0)
    assert by_node(world) == by_node(opened([8, 8], group__size=4, scheduler__affinity=False)), (
        "no slack at all comes to the same"
    )
    assert by_node(opened([8, 8], group__size=4, scheduler__affinity_slack=0.5))["rollout-0"] == [0, 0, 0, 0, 2, 2, 2, 2]


def test_f52_equal_nodes_take_turns() -> None:
    world = World(make_config())
    for index in range(4):
        world.join(f"rollout-{index}", 100)
    world.update_all()
    chosen = []
    for number in range(8):
        world.send(e.EvalStarted(f"run-{number}", [task(number)], 0.0))
        (node,) = [node for node in world.nodes.values() if node.leases]
        chosen.append(node.name)
        world.finish(node, next(iter(node.leases.values())))
        if number % 2:
            world.publish()  # nothing new: every node is asked nothing
            for name in list(world.core.tables.nodes.by_name):
                world.core.tables.nodes.touch(world.core.tables.nodes.by_name[name])
    assert chosen == 2 * [f"rollout-{index}" for index in range(4)], "no node is favoured by its place in a list"


def test_a_freed_place_goes_to_a_mate_before_a_member_that_belongs_elsewhere() -> None:
    world = opened([16, 16], group__size=4, batch__groups=8)
    first, second = world.nodes["rollout-0"], world.nodes["rollout-1"]
    assert {node: set(groups) for node, groups in by_node(world).items()} == {
        "rollout-0": {0, 2, 4, 6},
        "rollout-1": {1, 3, 5, 7},
    }
    world.finish(first, next(iter(first.leases.values())))
    assert 8 in by_node(world)["rollout-0"], "a new group begins here"
    world.finish(second, next(iter(second.leases.values())))
    assert 9 in by_node(world)["rollout-1"], "and another there, although mates of group 8 wait for the first node"
    world.finish(first, next(iter(first.leases.values())))
    assert by_node(world)["rollout-0"].count(8) == 2


def test_no_group_is_left_behind_by_more_than_a_batch_for_the_sake_of_affinity() -> None:
    world = opened([12, 12], group__size=4, batch__groups=1)
    first, second = world.nodes["rollout-0"], world.nodes["rollout-1"]
    world.finish(first, next(iter(first.leases.values())))
    assert 6 in by_node(world)["rollout-0"]
    world.finish(second, next(iter(second.leases.values())))
    assert 6 in by_node(world)["rollout-1"], "with batches of one group a mate of group 6 does not wait for its home"


def test_the_oldest_group_is_leased_first() -> None:
    world = opened([6])
    lost = world.nodes["rollout-0"]
    other = world.join("rollout-1", 6)
    world.settle_updates()
    younger = list(other.leases.values())
    assert len(younger) == 6 and {lease.grant.group for lease in lost.leases.values()} == {0, 1, 2}
    for lease in list(lost.leases.values()):
        world.delta(lost, lease)
    del world.nodes["rollout-0"]
    world.send(e.NodeLost("rollout-0", lost.session, "killed"))
    assert world.core.tables.waiting.count == 6
    for lease in younger:
        world.finish(other, lease)
    granted = [lease.grant.group for lease in other.leases.values()]
    assert granted == [0, 0, 1, 1, 2, 2]


def test_versions_within_a_trajectory_never_decrease() -> None:
    """A moved episode goes only to a node at the version of its last token or newer; until one is there it waits."""
    world = opened([2, 4])
    old, new = world.nodes["rollout-0"], world.nodes["rollout-1"]
    world.one_step()
    world.publish()
    world.sent()
    world.load(new)
    for lease in list(new.leases.values()):
        world.delta(new, lease)
    moved = [lease.grant.episode for lease in new.leases.values()]
    assert moved and (old.version, new.version) == (0, 1)
    world.send(e.NodeLost("rollout-1", new.session, "killed"))
    del world.nodes["rollout-1"]
    for lease in list(old.leases.values()):
        world.finish(old, lease)
    assert not any(episode in old.leases for episode in moved), "the older node had room and did not get them"
    world.load(old)
    for lease in list(old.leases.values()):
        world.finish(old, lease)
    assert any(episode in old.leases for episode in moved)


def test_a_silent_node_is_fenced_after_the_lease_and_not_before() -> None:
    world = opened([2, 2], scheduler__lease_seconds=15.0)
    world.advance(10.0)
    world.heard(world.nodes["rollout-0"])
    world.advance(4.9)
    assert world.tally("fenced", "silent") == 0
    world.advance(0.2)
    assert world.nodes["rollout-1"].fenced and not world.nodes["rollout-0"].fenced
    assert world.tally("lease_expiries") == 2
    assert world.tally("attempts_failed", "infra", "node_lost") == 2


def test_f51_f59_an_episode_that_its_node_forgot_does_not_stay_leased_for_ever() -> None:
    world = opened([2], rollout__wall_seconds=20.0)
    node = world.nodes["rollout-0"]
    lost, kept = list(node.leases.values())
    limit = progress_seconds(world.config)
    for _ in range(int(limit // 5) - 1):
        world.heard(node)
        world.delta(node, kept)
        world.advance(5.0)
    assert not world.tally("attempts_failed", "infra", "no_progress")
    for _ in range(2):
        world.heard(node)
        world.advance(5.0)
    assert world.tally("attempts_failed", "infra", "no_progress") == 1
    assert lost.grant.episode not in node.leases, "the node is told to stop it"
    world.rest(3.0)
    while lost.grant.episode not in node.leases:  # first comes the last member of the group that began in its place
        world.finish(node, next(lease for lease in node.leases.values() if lease is not kept))
    assert node.leases[lost.grant.episode].grant.attempt == 2
    assert node.leases[kept.grant.episode] is kept
    world.rest(limit + 10.0)
    assert world.tally("attempts_failed", "infra", "no_progress") == 3, "the others are watched on, however late they fell silent"


def test_a_new_session_ends_the_old_one_and_an_old_one_is_refused() -> None:
    world = opened([2])
    world.join("rollout-0", 2)
    assert world.tally("fenced", "replaced") == 1
    world.send(e.NodeJoined("rollout-0", 1, 2, 2))
    assert world.core.tables.nodes.by_name["rollout-0"].session == 2
    world.settle_updates()
    world.drain(2)


def test_a_node_that_says_it_never_had_a_lease_gives_it_back() -> None:
    world = opened([2])
    node = world.nodes["rollout-0"]
    lease = next(iter(node.leases.values()))
    node.leases.pop(lease.grant.episode)
    world.send(Discarded(*lease.key))
    assert world.tally("attempts_failed", "infra", "discarded") == 1
    world.rest(3.0)
    for held in list(node.leases.values()):
        world.finish(node, held)
    assert node.leases[lease.grant.episode].grant.attempt == 2


def test_evaluation_leases_come_first_and_wait_for_the_newest_weights() -> None:
    world = opened([2])
    node = world.nodes["rollout-0"]
    world.send(e.EvalStarted("after", [task(7), task(8)], 0.0))
    assert {lease.grant.purpose for lease in node.leases.values()} == {"train"}, "both places are taken"
    for lease in list(node.leases.values()):
        world.finish(node, lease)
    assert {lease.grant.purpose for lease in node.leases.values()} == {"eval"}
    for lease in list(node.leases.values()):
        assert lease.grant.priority < 0 and lease.grant.temperature == 0.0
        world.delta(node, lease, reward=1.0)
        world.finish(node, lease)
    assert world.evals_done == ["after"]
    run = world.core.eval_run("after")
    assert run is not None and (run.finished, run.failed, run.success) == (2, 0, [1.0, 1.0])


def test_f10_evaluation_has_no_place_in_admission_and_admission_none_for_it() -> None:
    world = opened([100], batch__groups=2)
    live = len(world.core.groups.live)
    admitted = world.core.tables.episodes.admitted
    world.send(e.EvalStarted("beside", [task(i) for i in range(5)], 0.0))
    assert len(world.core.groups.live) == live
    assert world.core.tables.episodes.admitted == admitted
    assert world.core.tables.episodes.eval_counts[State.LEASED] == 5
    world.send(e.EvalStarted("beside", [task(1)], 0.0))
    assert world.core.tables.episodes.eval_counts[State.LEASED] == 5, "the same name again is a repeated call"


def test_a_stop_drops_what_runs_and_leaves_what_was_evaluated() -> None:
    world = opened([4])
    world.send(e.EvalStarted("now", [task(1), task(2)], 0.0))
    node = world.nodes["rollout-0"]
    for lease in [lease for lease in node.leases.values() if lease.grant.purpose == "train"]:
        world.finish(node, lease)
    evals = [lease for lease in node.leases.values() if lease.grant.purpose == "eval"]
    world.delta(node, evals[0], reward=1.0)
    world.finish(node, evals[0])
    world.stopped = True
    world.send(e.StopRequested("enough"))
    counts = world.core.tables.episodes.eval_counts
    assert (counts[State.DELIVERED], counts[State.DROPPED]) == (1, 1)


def test_an_evaluation_of_nothing_is_done() -> None:
    world = opened([2])
    world.send(e.EvalStarted("empty", [], 0.0))
    assert world.evals_done == ["empty"]
