"""Faults of other systems that no other test of the rollout node meets head on (docs/faults.md)."""

from __future__ import annotations

import asyncio

import chat_tokenizers as made
import pytest
from fake_pool import FakePool
from fake_scheduler import Record
from node_world import Line, World, config, run

from rollout.chat import ChatRenderer
from rollout.envclient import EnvCallFailed, EnvClient
from rollout.log import Budget, EpisodeLog
from rollout.tasks import Tasks
from segue import wire
from segue.config.envpool import EnvPoolConfig
from segue.episode import EpisodeSnapshot, Outcome, Task
from segue.metrics import Metrics
from segue.ports.engine import GenerateRequest
from segue.ports.envpool import Create, EnvDeliver, Step
from segue.ports.rollout import Loaded, Paused

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


def test_f73_a_word_with_two_encodings_goes_on_as_it_was_sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy spells "lamp" in letters, where encoding the text gives one token: the next turn's context has the letters."""
    tokenizer = made.chatml()
    renderer = ChatRenderer(tokenizer)
    spelt = [*(tokenizer.encode(letter)[0] for letter in "lamp"), renderer.close_tokens[-1]]
    assert tokenizer.encode("lamp") != spelt[:-1] and renderer.text(spelt) == "lamp"
    monkeypatch.setattr("node_world.renderer", lambda: renderer)

    async def main() -> None:
        async with World(policy=lambda request, index: spelt[index % 5]) as w:
            await w.lease(0, task=TASK)
            record = await w.scheduler.finished(0)
            log = record.log()
            assert log.tokens[log.mask == 1].tolist() == 3 * spelt
            assert [body.action for body in record.bodies() if body.action_complete] == 3 * ["lamp"]
            for request in w.node.engine.requests:
                assert request.tokens == log.tokens.tolist()[: len(request.tokens)]

    run(main())


def test_f74_a_late_reply_does_not_answer_the_call_that_waits_now() -> None:
    """The reply to the step that timed out comes while the next step is awaited."""

    async def main() -> None:
        metrics = Metrics("rollout", "0", envs=("talk",))
        tasks = Tasks(lambda name, error: pytest.fail(f"{name}: {error}"))
        client = EnvClient("rollout-0", EnvPoolConfig(step_seconds=10.0), metrics, tasks.spawn)
        client.begin(1)
        pool = FakePool("envpool-0", 0.0)

        class Back:
            name, session = "rollout-0", 1

            async def call(self, method: str, body: bytes, timeout: float) -> bytes:
                return wire.encode(await client.deliver(wire.decode(body, EnvDeliver)))

        pool.nodes["rollout-0"] = Back()
        client.connect(pool.name, Line(pool.name, pool.service.handle))
        await client.create(Create(0, 1, Task("t", "talk", 1, {"turns": 100}), 0))
        pool.slow = lambda episode, attempt, step: 35.0 if step == 0 else 10.0
        with pytest.raises(EnvCallFailed, match="did not answer step 0 for 30 s"):
            await client.step(Step(0, 1, 0, "first"))
        second = client.step(Step(0, 1, 1, "second"))
        await asyncio.sleep(6.0)
        assert metrics.value("segue_messages_refused_total", reason="unexpected") == 1, "the first reply has come"
        assert not second.done()
        assert (await second) == pool.replies[0, 1, 1]
        await tasks.cancel()

    run(main())
