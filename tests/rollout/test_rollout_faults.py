"""Faults of other systems that no other test of the rollout node meets head on (docs/faults.md)."""

from __future__ import annotations

import asyncio

from fake_scheduler import Record
from node_world import World, config, run

from rollout.log import Budget, EpisodeLog
from segue.episode import EpisodeSnapshot, Outcome, Task
from segue.ports.engine import GenerateRequest
from segue.ports.scheduler import Loaded, Paused

TASK = Task("task", "talk", 5, {"turns": 3})


def tens(request: GenerateRequest, index: int) -> int:
    """Words only: a turn ends by its length."""
    return 20 + index % 7


def test_f07_an_attempt_from_the_prompt_carries_no_token_of_the_one_before() -> None:
    """Sampled under two versions, then begun anew: nothing of it is in the context, in the noise's position or in the log."""

    async def main(anew: bool) -> Record:
        async with World(config(rollout={"max_turn_tokens": 30}), policy=tens) as w:
            w.node.receiver.seconds = 0.0
            await w.lease(0, task=TASK)
            record = w.scheduler.episodes[0]
            if anew:
                await asyncio.sleep(0.2)
                assert isinstance(await w.update(), Loaded)
                await asyncio.sleep(0.2)
                assert set(record.log().versions.tolist()) >= {-1, 1}, "tokens of older weights were accepted"
                record.deltas.clear()
                before = len(w.node.engine.requests)
                await w.lease(0)
                await w.scheduler.finished(0)
                first = w.node.engine.requests[before]
                assert (first.offset, first.lineage, len(first.tokens)) == (0, 2, len(record.bodies()[0].log))
                assert record.log().versions[record.log().mask == 1].tolist() == [2] * 90
            return await w.scheduler.finished(0)

    assert run(main(True)).log().tokens.tolist() == run(main(False)).log().tokens.tolist()


def test_f27_no_part_of_an_interrupted_episode_passes_for_a_finished_one() -> None:
    """Its outcome follows from the whole log: whatever an interruption leaves behind has none, wherever it came."""

    async def main() -> Record:
        async with World(config(rollout={"max_turn_tokens": 30}), policy=tens) as w:
            w.node.receiver.seconds = 0.0
            await w.lease(0, task=TASK)
            for _ in range(4):
                await asyncio.sleep(0.17)
                assert isinstance(await w.update(), Loaded)
            record = await w.scheduler.finished(0)
            assert any(isinstance(event, Paused) for event in w.scheduler.events)
            return record

    record = run(main())
    bodies = record.bodies()
    parts = [n for n, body in enumerate(bodies, start=1) if body.record is None and not body.action_complete]
    assert len(parts) >= 2, "parts of actions"

    def outcome(n: int, budget: Budget) -> Outcome | None:
        return EpisodeLog.restore(EpisodeSnapshot(next_seq=n, deltas=record.deltas[:n]), budget).outcome

    for n in range(len(bodies) + 1):
        assert outcome(n, Budget(6, 400, 30, 1)) == (Outcome.TERMINATED if n == len(bodies) else None), n
    for n in parts:  # nor does one that just has no room left, or no further turn
        assert outcome(n, Budget(6, sum(len(body.log) for body in bodies[:n]) + 1, 30, 1)) is None, n
        assert outcome(n, Budget(0, 400, 30, 1)) is None, n
