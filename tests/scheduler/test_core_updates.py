"""Updates: who takes part, what each outcome means, and that no failure holds the others up."""

from __future__ import annotations

import pytest
from core_world import World, make_config

from scheduler.core import events as e
from segue.ports.rollout import Loaded
from segue.ports.transfer import TransferResult


def world_of(nodes: int, **sections: object) -> World:
    world = World(make_config(staleness__max_age=8, **sections))
    for index in range(nodes):
        world.join(f"rollout-{index}", 4)
    world.send(e.TrainingOpened(1000))
    return world


def members(world: World) -> list[str]:
    assert world.sending is not None
    return world.sending.members


def fenced(world: World) -> list[str]:
    return [node.name for node in world.nodes.values() if node.fenced]


def heard(world: World) -> None:
    for node in world.nodes.values():
        if not node.fenced:
            world.heard(node)


def pass_time(world: World, seconds: float) -> None:
    """Time passes with every node heard of."""
    for _ in range(int(seconds)):
        heard(world)
        world.advance(1.0)


def test_joining_nodes_have_the_newest_weights_before_their_first_lease() -> None:
    world = world_of(1)
    world.publish()
    assert members(world) == ["rollout-0"]
    assert not world.nodes["rollout-0"].leases
    world.settle_updates()
    assert world.nodes["rollout-0"].leases
    late = world.join("rollout-1", 4)
    assert members(world) == ["rollout-1"], "one that joins later is served by itself"
    assert not late.leases
    world.settle_updates()
    assert late.version == 0 and late.leases


def test_one_transfer_at_a_time_and_always_the_newest_version() -> None:
    """F31: versions published meanwhile are skipped, except the last."""
    world = world_of(2)
    world.update_all()
    world.one_step()
    world.publish()
    first = world.sending
    for _ in range(3):
        world.one_step()
        world.publish()
    assert world.sending is first, "nothing new begins while a transfer runs"
    newest = world.core.tables.versions.newest
    world.sent()
    for node in world.nodes.values():
        world.load(node)
    assert world.sending is not None and world.sending.version == newest
    world.settle_updates()
    assert {node.version for node in world.nodes.values()} == {newest}
    assert world.core.updates.figures["updates"] == 3, "two of the five versions were never sent"


def test_rolling_updates_a_share_at_a_time_so_that_generation_goes_on() -> None:
    world = world_of(4, update__rolling=0.5)
    world.update_all()
    world.drain(1)
    world.publish()
    seen = []
    while world.sending is not None:
        names = members(world)
        seen.append(names)
        assert len(names) == 2
        serving = [n.name for n in world.core.tables.nodes if n.serving and n.update is None]
        assert len(serving) >= 2, "the others keep generating"
        world.sent()
        for name in names:
            world.load(world.nodes[name])
    assert sorted(name for names in seen for name in names) == sorted(world.nodes)


def test_a_frozen_node_of_a_rolling_share_is_dropped_and_generation_never_stops_on_all() -> None:
    world = world_of(4, update__rolling=0.5, update__deadline_seconds=10.0)
    world.update_all()
    world.drain(1)
    world.publish()

    def serving() -> list[str]:
        return [node.name for node in world.core.tables.nodes if node.serving and node.update is None]

    first = members(world)
    frozen, loaded = first
    world.sent()
    world.load(world.nodes[loaded])
    assert len(serving()) == 3 and frozen not in serving()
    pass_time(world, 11)
    assert [name for name, node in world.nodes.items() if node.fenced] == [frozen]
    rest = members(world)
    assert not set(rest) & set(first) and serving(), "the next share follows, and somebody serves meanwhile"
    while world.sending is not None:
        names = members(world)
        assert serving()
        world.sent()
        for name in names:
            world.load(world.nodes[name])
    newest = world.core.tables.versions.newest
    assert {node.version for name, node in world.nodes.items() if name != frozen} == {newest}


def test_a_learner_rank_that_is_missing_from_a_transfer_costs_no_node() -> None:
    """With several sources the sender names a dead or frozen one like a member: nobody is fenced, the same members try again."""
    world = world_of(2)
    world.update_all()
    world.drain(1)
    world.publish()
    before = world.sending
    assert before is not None
    world.sent(ok=False, missing=["learner-1"])
    assert not any(node.fenced for node in world.nodes.values())
    world.rest(1.0)
    after = world.sending
    assert after is not None and after.members == before.members and after.group != before.group
    world.settle_updates()
    assert all(node.version == world.core.tables.versions.newest for node in world.nodes.values())


def test_the_process_group_is_used_again_by_the_same_sessions_only() -> None:
    world = world_of(2)
    groups = []

    def step() -> None:
        assert world.sending is not None
        groups.append((world.sending.group, world.sending.transfer))
        world.settle_updates()
        world.drain(1)
        world.publish()

    world.publish()
    step()
    step()
    assert groups[0][0] == groups[1][0] and groups[0][1] != groups[1][1]
    world.settle_updates()
    world.join("rollout-1", 4)
    world.settle_updates()
    world.drain(1)
    world.publish()
    assert world.sending is not None and world.sending.group not in {group for group, _ in groups}


def test_every_engine_rank_is_a_member_and_one_that_is_missing_is_its_node() -> None:
    world = world_of(2, rollout__engine="vllm", rollout__engine_args={"tensor_parallel_size": 2})
    world.publish()
    assert members(world) == ["rollout-0/0", "rollout-0/1", "rollout-1/0", "rollout-1/1"]
    world.sent(ok=False, missing=["rollout-1/0"])
    assert fenced(world) == ["rollout-1"] and members(world) == ["rollout-0/0", "rollout-0/1"]


def test_a_transfer_with_missing_members_is_repeated_by_the_survivors() -> None:
    world = world_of(3)
    world.publish()
    before = world.sending
    assert before is not None
    world.sent(ok=False, missing=["rollout-1"])
    after = world.sending
    assert after is not None
    assert after.members == ["rollout-0", "rollout-2"]
    assert after.transfer != before.transfer and after.group != before.group
    assert world.nodes["rollout-1"].fenced
    assert [line for line in world.trace if line.startswith("Abandon")]
    world.settle_updates()
    assert world.nodes["rollout-0"].leases and world.nodes["rollout-2"].leases


def test_a_member_that_loaded_before_the_transfer_broke_need_not_take_part_again() -> None:
    world = world_of(2)
    world.publish()
    world.load(world.nodes["rollout-0"])
    world.sent(ok=False, missing=[])
    assert members(world) == ["rollout-1"]


def test_a_broken_process_group_is_never_used_again() -> None:
    world = world_of(2)
    world.publish()
    before = world.sending
    world.sent(ok=False, missing=[])
    assert not world.transfers, "not at once: nobody was to blame, and it may fail again as fast"
    world.rest(1.0)
    after = world.sending
    assert before is not None and after is not None
    assert after.members == before.members and after.group != before.group


def test_f35_a_node_that_misses_the_deadline_is_fenced_and_the_update_goes_on() -> None:
    world = world_of(2, update__deadline_seconds=10.0)
    world.update_all()
    world.one_step()
    world.publish()
    world.sent()
    world.load(world.nodes["rollout-0"])
    held = [lease.grant.episode for lease in world.nodes["rollout-1"].leases.values()]
    assert held
    pass_time(world, 9)
    assert world.tally("fenced", "update_deadline") == 0
    pass_time(world, 2)
    assert [node.name for node in world.nodes.values() if node.fenced] == ["rollout-1"]
    assert world.tally("fenced", "update_deadline") == 1
    assert world.tally("attempts_failed", "infra", "fenced") == len(held)
    assert not world.core.updates.rounds
    world.drain(2)


def test_a_sender_that_never_answers_is_given_up_at_the_deadline() -> None:
    world = world_of(2, update__deadline_seconds=10.0)
    world.publish()
    pass_time(world, 11)
    assert all(node.fenced for node in world.nodes.values())
    assert world.tally("transfers_unanswered") == 1
    world.transfers.clear()
    world.drain(1)


def test_a_result_that_was_lost_does_not_hold_up_what_was_loaded() -> None:
    world = world_of(1, update__deadline_seconds=10.0)
    world.publish()
    world.load(world.nodes["rollout-0"])
    assert world.nodes["rollout-0"].leases, "the node serves at once"
    pass_time(world, 11)
    assert not world.nodes["rollout-0"].fenced
    assert not world.core.updates.rounds
    world.transfers.clear()
    world.drain(2)


@pytest.mark.parametrize("inflight", ["recompute", "keep", "turn", "episode"])
def test_new_leases_wait_for_the_load_only_where_whole_episodes_finish_first(inflight: str) -> None:
    world = world_of(1, update__inflight=inflight)
    world.update_all()
    node = world.nodes["rollout-0"]
    world.one_step()
    world.publish()
    for lease in list(node.leases.values()):
        world.delta(node, lease, reward=float(lease.grant.episode % 2))
        world.finish(node, lease)
    assert bool(node.leases) == (inflight != "episode")
    world.sent()
    world.load(node)
    assert node.leases


def test_a_node_that_cannot_load_tries_again_and_is_fenced_after_three_times() -> None:
    world = world_of(2)
    world.update_all()
    world.drain(1)
    world.publish()
    world.sent()
    world.load(world.nodes["rollout-0"])
    bad = world.nodes["rollout-1"]
    for _ in range(2):
        world.load_fails(bad)
        assert not bad.fenced and bad.leases is not None
        world.rest(2.0)
        assert members(world) == ["rollout-1"]
        world.sent()
    world.load_fails(bad)
    assert bad.fenced
    assert world.tally("fenced", "load_failed") == 1
    assert world.sending is None and not world.fatals


def test_a_node_left_without_weights_is_fenced_at_once() -> None:
    world = world_of(2)
    world.publish()
    world.load_fails(world.nodes["rollout-1"], fatal=True)
    assert world.nodes["rollout-1"].fenced
    world.sent()
    world.load(world.nodes["rollout-0"])
    assert not world.core.updates.rounds


def test_a_load_that_failed_with_its_transfer_is_not_held_against_the_node() -> None:
    world = world_of(2)
    world.publish()
    world.load_fails(world.nodes["rollout-0"])
    world.sent(ok=False, missing=["rollout-1"])
    assert members(world) == ["rollout-0"]
    assert world.core.tables.nodes.by_name["rollout-0"].load_failures == 0
    world.settle_updates()
    assert world.nodes["rollout-0"].version == 0


def failing_rounds(world: World) -> tuple[int, list[float]]:
    """Let every transfer fail at once with nobody to blame, until the run ends: how many there were, and the pauses between."""
    attempts, pauses = 0, [0.0]
    while not world.fatals:
        if world.sending is None:
            pause = world.now
            world.rest(0.25)
            pauses[-1] += world.now - pause
            continue
        world.sent(ok=False, missing=[])
        attempts += 1
        pauses.append(0.0)
        assert attempts <= 20
    return attempts, pauses[1:-1]


def test_weights_that_reach_nobody_end_the_run_with_the_reason() -> None:
    world = world_of(1)
    world.publish()
    assert failing_rounds(world) == (5, [1.0, 2.0, 4.0, 8.0]), "ever longer pauses, and not for ever"
    (fatal,) = world.fatals
    assert fatal.part == "weightsync" and "a member is missing" in fatal.sentence and "5 attempts" in fatal.sentence


def test_rounds_whose_nodes_are_lost_are_no_reason_to_end_the_run() -> None:
    """A cut cable, again and again: each time another node, or the same one anew, is given the weights."""
    world = world_of(1)
    for _ in range(7):
        world.publish()
        node = world.nodes["rollout-0"]
        world.send(e.NodeLost(node.name, node.session, "gone"))
        world.sent(ok=False, missing=[])
        world.rest(40.0)
        world.join("rollout-0")
    assert not world.fatals


def test_transfers_that_fail_with_nobody_to_blame_end_the_run_though_others_have_the_weights() -> None:
    world = world_of(2)
    world.update_all()
    world.drain(1)
    world.publish()
    world.load(world.nodes["rollout-0"])
    world.sent(ok=False, missing=[])
    assert world.nodes["rollout-0"].version == 1
    attempts, pauses = failing_rounds(world)
    assert attempts <= 6 and pauses == sorted(pauses) and pauses[-1] >= 8.0
    assert "could not be sent to rollout-1 in 5 attempts: a member is missing" in world.fatals[0].sentence


def test_a_transfer_that_succeeds_ends_the_pauses() -> None:
    world = world_of(1)
    world.publish()
    for pause in (1.0, 2.0):
        world.sent(ok=False, missing=[])
        world.rest(pause)
    world.settle_updates()
    world.drain(1)
    world.publish()
    world.sent(ok=False, missing=[])
    world.rest(0.75)
    assert world.sending is None
    world.rest(0.25)
    assert world.sending is not None, "the first pause again"


# --- joins beside updates ---------------------------------------------------------------------------------------------


def test_a_join_that_hangs_does_not_hold_up_the_updates_of_the_others() -> None:
    world = world_of(2, update__deadline_seconds=60.0)
    world.update_all()
    world.join("rollout-2", 4)
    hanging = world.sending
    assert hanging is not None and hanging.members == ["rollout-2"]
    for version in (1, 2, 3):
        world.one_step()
        world.publish()
        (_, update) = world.transfers
        assert (update.version, update.members) == (version, ["rollout-0", "rollout-1"])
        world.transfers.remove(update)
        world.send(TransferResult(version, update.transfer, True, [], "", 100, 0.1, 0.2))
        for name in update.members:
            world.load(world.nodes[name])
        pass_time(world, 5)
    assert not fenced(world)
    pass_time(world, 46)
    assert fenced(world) == ["rollout-2"]
    assert world.tally("fenced", "update_deadline") == 1 and not world.fatals


def test_an_update_that_runs_does_not_hold_up_a_join() -> None:
    world = world_of(1)
    world.update_all()
    world.one_step()
    world.publish()
    late = world.join("rollout-1", 4)
    assert [transfer.members for transfer in world.transfers] == [["rollout-0"], ["rollout-1"]]
    world.load(late)
    assert late.leases, "it serves while the other still loads"


def test_who_joins_with_older_weights_than_the_others_run_by_then_gets_nothing_that_needs_newer_ones() -> None:
    world = World(make_config(mode="sync", rollout__max_episodes=1))
    world.join("rollout-0", 1)
    world.send(e.TrainingOpened(1000))
    world.update_all()
    late = world.join("rollout-1", 1)
    world.one_step()
    world.publish()
    world.transfers.reverse()
    world.sent()
    world.load(world.nodes["rollout-0"])
    assert world.core.tables.waiting.count and late.update is not None
    world.load(late)
    assert late.version == 0 and not late.leases
    world.drain(3)


def test_joins_that_hang_do_not_hold_up_another() -> None:
    """There are few at a time; whoever finds no place comes along in the next, together."""
    world = world_of(1, update__deadline_seconds=10.0)
    world.update_all()
    nodes = [world.join(f"rollout-{i}", 4) for i in range(1, 7)]
    assert [transfer.members for transfer in world.transfers] == [[node.name] for node in nodes[:4]]
    world.transfers.pop()
    world.send(TransferResult(0, nodes[3].update[0] if nodes[3].update else 0, True, [], "", 100, 0.1, 0.2))
    world.load(nodes[3])
    assert [transfer.members for transfer in world.transfers][3:] == [["rollout-5", "rollout-6"]]


def test_a_node_that_fails_again_and_again_is_tried_after_ever_longer_pauses() -> None:
    world = world_of(1, update__deadline_seconds=10.0)
    world.update_all()
    pauses = []
    for _ in range(8):
        node = world.join("rollout-1", 4)
        began = world.now
        while node.update is None:
            pass_time(world, 1)
        pauses.append(world.now - began)
        pass_time(world, 11)
        assert node.fenced
    assert pauses == [0.0, 0.0, 1.0, 3.0, 7.0, 15.0, 31.0, 59.0], "the pauses count from the failure, a second before"
    assert [line for line in world.warnings if "rollout-1 could not be given weights 3 times in a row" in line]
    assert not world.fatals, "the others go on without it"
    node = world.join("rollout-1", 4)
    while node.update is None:
        pass_time(world, 1)
    world.load(node)
    assert node.leases
    node = world.join("rollout-1", 4)
    assert node.update is not None, "once it has loaded, all is forgotten"


def test_a_join_that_fails_with_nobody_to_blame_is_no_reason_to_end_the_run() -> None:
    world = world_of(1)
    world.update_all()
    node = world.join("rollout-1", 4)
    for attempt in range(10):
        while node.update is None:
            pass_time(world, 1)
        assert world.sending is not None and world.sending.members == ["rollout-1"]
        world.sent(ok=False, missing=[])
        assert node.update is None, f"attempt {attempt} is followed by a pause"
    assert not world.fatals and len([line for line in world.warnings if "rollout-1" in line]) == 1
    world.drain(2)


def test_in_sync_mode_a_node_that_joins_does_not_hold_up_admission() -> None:
    world = World(make_config(mode="sync"))
    world.join("rollout-0", 4)
    world.send(e.TrainingOpened(1000))
    world.update_all()
    world.join("rollout-1", 4)
    for step in (1, 2):
        world.one_step()
        world.publish()
        update = world.transfers.pop()
        assert update.members == ["rollout-0"]
        world.send(TransferResult(step, update.transfer, True, [], "", 100, 0.1, 0.2))
        world.load(world.nodes["rollout-0"])
        assert world.nodes["rollout-0"].leases


def test_reports_of_an_update_that_is_over_change_nothing() -> None:
    world = world_of(2)
    world.publish()
    old = world.sending
    assert old is not None
    world.sent(ok=False, missing=["rollout-1"])
    node = world.nodes["rollout-0"]
    world.send(e.FromNode("rollout-0", node.session, Loaded(old.transfer, 0, 0.0, 0.0, 0.0)))
    world.send(TransferResult(0, old.transfer, True, [], "", 1, 0.0, 0.0))
    world.send(e.FromNode("rollout-0", node.session + 5, Loaded(old.transfer, 0, 0.0, 0.0, 0.0)))
    assert world.core.tables.nodes.by_name["rollout-0"].version == -1
    assert world.tally("refused", "unexpected") == 2
    assert world.tally("refused", "stale_session") == 1
    world.settle_updates()
    assert node.version == 0


def test_one_step_off_is_eta_one_with_whole_episodes() -> None:
    config = make_config(mode="one_step_off")
    assert (config.staleness.max_age, config.update.inflight) == (1, "episode")
    world = World(config)
    world.join("rollout-0", 100)
    world.update_all()
    world.send(e.TrainingOpened(100))
    assert len(world.core.groups.live) == 4
    world.drain(10)


def test_no_node_at_all_for_long_ends_the_run() -> None:
    world = world_of(1)
    world.update_all()
    world.advance(16.0)
    assert not world.fatals and not len(world.core.tables.nodes)
    world.advance(800.0)
    assert not world.fatals, "another node may be on its way, from a host that comes back"
    world.advance(20.0)
    (fatal,) = world.fatals
    assert "No rollout node has been heard of for 810 s" in fatal.sentence
    assert "fenced last: rollout-0 (silent)" in fatal.sentence
