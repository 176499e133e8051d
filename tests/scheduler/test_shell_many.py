"""The shell where there is much of something: groups that begin at once, ranks that ask at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest
from shell_world import FakeNode, ShellWorld, run

from segue import wire
from segue.ports import driver as driver_port
from segue.ports import learner as learner_port
from segue.ports.rpc import RemoteError, ask

T = TypeVar("T")


def test_any_number_of_batches_of_groups_may_begin_in_one_commit(tmp_path: Path) -> None:
    """Tasks are asked for by the batch; a node with room for 600 batches takes them all in one message."""

    async def course() -> None:
        world = ShellWorld(
            tmp_path, nodes=0, batch__groups=1, staleness__max_age=600, envpool__workers=40, rollout__max_episodes=600
        )
        node = FakeNode("rollout-0", world.shell, world.config, places=1200)
        node.broadcasts, node.turn_seconds = world.learner.broadcasts, 1e6
        world.nodes.append(node)
        await world.start()
        await world.learner.publish()
        await asyncio.sleep(5.0)
        assert len(world.shell.core.groups.live) == 600
        await world.stop()

    run(course)


def test_a_suite_may_call_its_tasks_environment_what_it_likes(tmp_path: Path) -> None:
    """A suite of the user's own is named module:function in the config, and by itself in its tasks."""

    async def course() -> None:
        world = ShellWorld(tmp_path, task__env="theirs:build", envs=["theirs:build"])
        await world.train(2)
        assert world.metrics.value("segue_episodes_admitted_total", env="theirs:build") >= 8

    run(course)


def test_a_mistake_of_the_schedulers_own_is_never_taken_for_a_callers(tmp_path: Path) -> None:
    """Whatever class it has: the state may be half changed, and the caller would only ask again."""

    async def course() -> None:
        world = ShellWorld(tmp_path, nodes=0)
        await world.shell.start()

        def broken() -> None:
            raise ValueError("zip() argument 2 is shorter than argument 1")

        world.shell.report.export = broken  # type: ignore[method-assign]
        with pytest.raises(RemoteError, match="zip"):
            await ask(world.driver, driver_port.GET_STATUS, driver_port.GetStatus(), 10.0)
        assert world.shell.failed and "ValueError: zip()" in world.shell.stopped
        del world.shell.report.export
        await world.shell.stop()

    run(course)


def test_a_learner_that_waits_is_told_whether_training_was_opened(tmp_path: Path) -> None:
    async def course() -> None:
        world = ShellWorld(tmp_path, nodes=0)
        await world.shell.start()
        take = learner_port.TakeBatch(0, 0, 1.0)
        assert not (await ask(world.driver, learner_port.TAKE_BATCH, take, 10.0)).opened
        await ask(world.driver, driver_port.OPEN_TRAINING, driver_port.OpenTraining(1), 10.0)
        assert (await ask(world.driver, learner_port.TAKE_BATCH, take, 10.0)).opened
        await world.shell.stop()

    run(course)


def test_ranks_that_ask_at_once_get_one_encoding(tmp_path: Path) -> None:
    async def course() -> None:
        world = ShellWorld(tmp_path)
        await world.start()
        await world.learner.publish()
        await asyncio.sleep(60.0)
        compute, encodings = world.shell.delivery._compute, 0

        class Counting:
            async def run(self, work: Callable[[], T], cost: float) -> T:
                nonlocal encodings
                encodings += 1
                await asyncio.sleep(0.5)
                return await compute.run(work, cost)

            def close(self) -> None:
                compute.close()

        world.shell.delivery._compute = Counting()
        asked = [ask(world.driver, learner_port.TAKE_BATCH, learner_port.TakeBatch(0, rank, 1.0), 10.0) for rank in range(4)]
        replies = await asyncio.gather(*asked)
        assert all(reply.batch is not None and wire.encode(reply) == wire.encode(replies[0]) for reply in replies)
        assert encodings == 1
        await world.stop()

    run(course)
