"""The small parts by themselves: timers, versions, waiting heaps, the table of nodes, and what operations cost."""

from __future__ import annotations

from core_world import World, make_config, task
from hypothesis import given
from hypothesis import strategies as st

from scheduler.core import events as e
from scheduler.core.episodes import Episode, Group
from scheduler.core.meter import Meter, Tally
from scheduler.core.nodes import Node, NodeTable
from scheduler.core.timers import Timers
from scheduler.core.versions import Versions
from scheduler.core.waiting import Waiting
from segue.episode import Purpose


@given(st.lists(st.tuples(st.sampled_from(["arm", "disarm", "due"]), st.integers(0, 5), st.integers(0, 20)), max_size=80))
def test_timers_fire_once_in_order_and_only_if_still_armed(steps: list[tuple[str, int, int]]) -> None:
    timers, model, now = Timers(Meter()), dict[int, float](), 0.0
    for what, key, amount in steps:
        if what == "arm":
            timers.arm("x", key, now + amount)
            model[key] = now + amount
        elif what == "disarm":
            timers.disarm("x", key)
            model.pop(key, None)
        else:
            now += amount
            fired = [int(key) for _, key in timers.due(now)]
            expected = {key for key, when in model.items() if when <= now}
            assert set(fired) == expected and len(fired) == len(expected)
            assert [model[key] for key in fired] == sorted(model[key] for key in fired)
            for key in fired:
                del model[key]
        assert timers.next() == min(model.values(), default=None)


def test_replaced_timers_do_not_pile_up() -> None:
    timers = Timers(Meter())
    for moment in range(10_000):
        timers.arm("x", moment % 3, float(moment))
    assert len(timers._heap) < 200


def test_versions_by_step_and_after_a_rollback() -> None:
    versions = Versions()
    assert versions.at_least(0) == 0 and versions.at_least(1) == 0 + versions.next_id
    for step in (0, 1, 1, 4):
        versions.publish(step)
    assert [versions.at_least(step) for step in range(6)] == [0, 1, 3, 3, 3, 4]
    assert 3 in versions and 4 not in versions
    versions.rollback(1)
    assert versions.table() == {0: 0, 1: 1, 2: 1, 3: 1}
    assert versions.at_least(1) == 1 and versions.at_least(2) == 4, "abandoned versions hold the restored step, none more"
    assert versions.publish(1) == 4 and versions.publish(2) == 5
    assert versions.at_least(2) == 5


def group(number: int, floor: int = 0) -> Group:
    return Group(number, task(number), 2, Purpose.TRAIN, floor, 1.0, 0.0)


@given(st.lists(st.tuples(st.sampled_from(["push", "remove", "take"]), st.integers(0, 9), st.integers(0, 3)), max_size=60))
def test_the_first_in_line_is_the_lowest_rank_that_fits(steps: list[tuple[str, int, int]]) -> None:
    waiting, model = Waiting(Meter()), dict[int, Episode]()
    order = 0
    pushed: dict[int, int] = {}
    for what, number, version in steps:
        if what == "push" and number not in model:
            episode = Episode(number, group(number // 2, floor=number % 3), number % 2)
            waiting.push(episode)
            model[number] = episode
            pushed[number] = order = order + 1
        elif what == "remove" and number in model:
            waiting.remove(model.pop(number))
        elif what == "take":
            fits = [n for n, episode in model.items() if episode.floor <= version]
            best = waiting.best(version)
            expected = min(fits, key=lambda n: (model[n].group.rank, pushed[n]), default=None)
            assert (best.id if best is not None else None) == expected
        assert waiting.count == len(model)


def test_the_least_loaded_node_with_room_at_the_version() -> None:
    table = NodeTable(Meter())
    nodes = [Node(f"n{i}", 1, 4, 0.0) for i in range(3)]
    for index, node in enumerate(nodes):
        table.add(node)
        table.loaded(node, index)
        table.touch(node)
    fake = Episode(0, group(0), 0)
    nodes[2].leased[0] = fake
    table.touch(nodes[2])
    assert table.least_loaded(0) is nodes[0]
    assert table.least_loaded(1) is nodes[1]
    assert table.least_loaded(2) is nodes[2]
    assert table.least_loaded(3) is None
    nodes[1].closed = True
    table.touch(nodes[1])
    assert table.least_loaded(1) is nodes[2]
    nodes[0].leased = dict.fromkeys(range(4), fake)
    table.touch(nodes[0])
    assert table.least_loaded(0) is nodes[2], "full nodes and closed ones are not offered"
    for _ in range(1000):
        table.touch(nodes[2])
    assert table._entries < 200
    assert table.oldest() == 0 and not table.all_run(2)


def test_the_tally_reads_by_name() -> None:
    tally = Tally()
    tally.count("dropped", "stale", "queue")
    tally.count("dropped", "stale", "queue", by=2)
    tally.count("resumed")
    assert tally.under("dropped") == {"stale|queue": 3}
    assert tally.under("resumed") == {"": 1}


def test_equal_events_give_equal_commands() -> None:
    def trace() -> list[str]:
        world = World(make_config(staleness__max_age=2))
        for name in ("rollout-1", "rollout-0"):
            world.join(name, 3)
        world.send(e.TrainingOpened(50))
        world.drain(10)
        return world.trace

    assert trace() == trace()


def test_a_delta_costs_a_constant_number_of_operations() -> None:
    world = World(make_config(staleness__max_age=8, batch__groups=64))
    node = world.join("rollout-0", 1000)
    world.update_all()
    world.send(e.TrainingOpened(1000))
    costs = set()
    for lease in list(node.leases.values()):
        before = world.core.operations
        world.delta(node, lease)
        costs.add(world.core.operations - before)
    assert costs == {1}
