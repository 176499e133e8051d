"""What a turn's generation took, as the metric `segue_turn_generate_seconds` says it."""

from __future__ import annotations

import asyncio

import pytest
from node_world import World, config, run

from segue.episode import Task
from segue.ports.engine import GenerateRequest

NAME = "segue_turn_generate_seconds"
STEP = 0.01
TASK = Task("task", "talk", 5, {"turns": 3})
BUDGET = {"max_turn_tokens": 100, "max_tokens": 2000}


def endless(request: GenerateRequest, index: int) -> int:
    return 20 + index % 7


def test_each_turn_is_observed_once_with_the_time_its_request_took() -> None:
    async def main() -> None:
        async with World(config(rollout=BUDGET), policy=endless, step=STEP) as w:
            await w.lease(0, task=TASK)
            await w.scheduler.finished(0)
            assert w.node.metrics.value(NAME) == 3
            assert w.node.metrics.sum(NAME) == pytest.approx(3 * 100 * STEP)

    run(main())


@pytest.mark.parametrize("inflight", ["recompute", "keep"])
def test_a_turn_that_an_update_interrupts_is_one_turn_without_the_pause(inflight: str) -> None:
    async def main() -> None:
        async with World(config(rollout=BUDGET, update={"inflight": inflight}), policy=endless, step=STEP) as w:
            w.node.receiver.seconds = 0.0
            w.node.engine.load_seconds = 3.0
            await w.lease(0, task=TASK)
            await asyncio.sleep(0.5)
            assert w.node.metrics.value(NAME) == 0, "the first turn still goes on"
            await w.update()
            await w.scheduler.finished(0)
            assert w.node.metrics.value(NAME) == 3
            spent = w.node.metrics.sum(NAME)
            assert spent == pytest.approx(3 * 100 * STEP, abs=2 * STEP), "the pause is in none of the requests"

    run(main())
