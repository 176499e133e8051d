"""Whole courses through the shell: clean, lossy, with deaths; the same inputs give the same course."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from shell_world import ShellWorld, run

from segue.ports import driver as driver_port
from segue.ports import rollout as rollout_port
from segue.ports.rpc import ask


@pytest.mark.parametrize("mode", ["async", "one_step_off", "sync"])
def test_every_mode_trains_through_the_shell(mode: str, tmp_path: Path) -> None:
    async def course() -> None:
        world = ShellWorld(tmp_path, mode=mode, steps=8)
        await world.train(8)
        assert [batch.step for batch in world.learner.batches] == list(range(8))
        counts = world.shell.core.tables.episodes
        assert counts.admitted == 8 * 2 * 2, "no more is admitted than the steps need"

    run(course)


@pytest.mark.parametrize("seed", range(3))
def test_lost_and_repeated_messages_change_nothing(seed: int, tmp_path: Path) -> None:
    """Every call in every direction is lost or repeated now and then: exactly once all the same."""

    async def course() -> None:
        world = ShellWorld(tmp_path, loss=0.1, steps=8, seed=seed)
        for index, node in enumerate(world.nodes):
            node.up._random.seed(100 * seed + index)
            node.down._random.seed(200 * seed + index)
        await world.train(8)
        assert [batch.step for batch in world.learner.batches] == list(range(8))
        tally = world.shell.core.tables.tally
        assert tally["refused", "duplicate"] > 0

    run(course)


def test_a_dead_node_is_fenced_and_its_episodes_go_on_elsewhere(tmp_path: Path) -> None:
    """F51, F59: running work holds a lease with a deadline; nothing sampled before the last delta is lost."""

    async def course() -> None:
        world = ShellWorld(tmp_path, steps=6)
        await world.start()
        training = asyncio.create_task(world.learner.train(6))
        await asyncio.sleep(4.0)
        assert world.shell.core.tables.nodes.by_name["rollout-1"].leased
        world.nodes[1].die()
        await asyncio.sleep(20.0)
        tally = world.shell.core.tables.tally
        assert tally["fenced", "silent"] == 1
        assert tally["attempts_failed", "infra", "node_lost"] > 0
        await training
        moved = [
            lease
            for lease in world.nodes[0].orders
            if isinstance(lease, rollout_port.Lease) and lease.attempt > 1 and lease.snapshot.deltas
        ]
        assert moved, "they go on from their deltas, not from scratch"
        warnings = [event.data["sentence"] for event in await world.events() if event.what == "warning"]
        assert any("rollout-1" in sentence and "silent" in sentence for sentence in warnings)
        await world.stop()

    run(course)


def test_a_node_that_comes_back_joins_under_a_new_session(tmp_path: Path) -> None:
    async def course() -> None:
        world = ShellWorld(tmp_path, steps=8)
        await world.start()
        training = asyncio.create_task(world.learner.train(8))
        await asyncio.sleep(3.0)
        node = world.nodes[1]
        node.up.cut_off = node.down.cut_off = True
        node.main.cancel()
        await asyncio.sleep(16.0)
        node.up.cut_off = node.down.cut_off = False
        node._drop_all()
        node.start()
        await training
        assert node.session == 2
        assert any(isinstance(order, rollout_port.Lease) for order in node.orders)
        await world.stop()

    run(course)


def test_a_frozen_node_learns_that_it_is_fenced(tmp_path: Path) -> None:
    """It missed an update's deadline: the update goes on, its exchange says `fenced`, and it joins anew."""

    async def course() -> None:
        world = ShellWorld(tmp_path, steps=30, update__deadline_seconds=5.0)
        await world.start()
        training = asyncio.create_task(world.learner.train(12))
        await asyncio.sleep(3.0)
        world.nodes[1].ignores_updates = True
        await asyncio.sleep(12.0)
        world.nodes[1].ignores_updates = False
        await training
        assert world.nodes[1].fenced >= 1
        assert world.shell.core.tables.tally["fenced", "update_deadline"] >= 1
        assert world.nodes[1].version >= 0
        await world.stop()

    run(course)


def trace(folder: Path, loss: float, **sections: Any) -> list[Any]:
    seen: list[Any] = []

    async def course() -> None:
        world = ShellWorld(folder, loss=loss, steps=6, **sections)
        for index, node in enumerate(world.nodes):
            node.up._random.seed(index)
            node.down._random.seed(index)
        await world.train(6)
        seen.extend([node.orders for node in world.nodes])
        seen.append(world.learner.batches)
        seen.append(world.journal.records)
        seen.append(world.shell.report.status())

    run(course)
    return seen


def test_equal_inputs_give_equal_courses(tmp_path: Path) -> None:
    """Serial determinism: orders, batches, journal and counts are the same twice."""
    assert trace(tmp_path / "a", 0.05) == trace(tmp_path / "b", 0.05)


def test_redundancy_is_the_same_twice_and_trains_exactly_g(tmp_path: Path) -> None:
    """Drops that cross finishes on a lossy wire: each extra member is dropped once, and no batch has one."""
    course = trace(tmp_path / "a", 0.05, group__redundancy=1)
    assert course == trace(tmp_path / "b", 0.05, group__redundancy=1)
    batches, status = course[-3], course[-1]
    assert all(len(group.members) == group.size == 2 for batch in batches for group in batch.groups)
    episodes = status["episodes"]
    assert episodes["admitted"] == 3 * 6 * 2 and episodes["states"]["trained"] == 2 * 6 * 2
    assert sum(n for reason, n in episodes["dropped"].items() if reason.startswith("redundant")) == 6 * 2
    assert status["redundant"]["episodes"] == 6 * 2


def test_the_state_clock_and_the_metrics_follow(tmp_path: Path) -> None:
    async def course() -> None:
        world = ShellWorld(tmp_path, steps=5)
        await world.train(5)
        metrics = world.metrics
        admitted = metrics.value("segue_episodes_admitted_total")
        assert admitted == metrics.value("segue_episodes_state") == 20
        finished = metrics.value("segue_episodes_finished_total")
        after_finish = sum(
            metrics.value("segue_episodes_state", state=s) for s in ("assembling", "queued", "delivered", "trained")
        )
        assert finished == after_finish + metrics.value("segue_episodes_dropped_total", stage="queue")
        assert metrics.value("segue_episodes_trained_total") == 20
        assert metrics.value("segue_episode_duration_seconds") == 20
        assert metrics.value("segue_queue_wait_seconds", queue="ready") == 10
        assert metrics.value("segue_group_completion_cv") == 10
        seconds = world.clock.seconds()
        assert seconds["wait_capacity"] > 0.9 * sum(seconds.values())

    run(course)


def test_evaluation_runs_beside_training_and_is_counted_apart(tmp_path: Path) -> None:
    async def course() -> None:
        world = ShellWorld(tmp_path, steps=5)
        await world.start()
        await world.learner.publish()
        tasks = [*world.shell._stream.take(7)]
        await ask(world.driver, driver_port.START_EVAL, driver_port.StartEval("before", tasks, 0.0), 10.0)
        await world.learner.train(5)
        state = await ask(world.driver, driver_port.EVAL_STATE, driver_port.EvalState("before"), 10.0)
        assert (state.n, state.finished, state.failed, state.done) == (7, 7, 0, True)
        assert len(state.success) == len(state.rewards) == 7
        assert [event.data for event in await world.events() if event.what == "eval"] == [{"name": "before"}]
        leases = [o for node in world.nodes for o in node.orders if isinstance(o, rollout_port.Lease)]
        evals = [lease for lease in leases if lease.purpose == "eval"]
        assert len(evals) == 7 and all(lease.sampling.temperature == 0.0 for lease in evals)
        assert world.shell.core.tables.episodes.admitted == 20
        await world.stop()
        assert world.metrics.value("segue_eval_episodes_total", result="finished") == 7

    run(course)
