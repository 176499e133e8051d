"""An episode that goes on elsewhere is the episode that was not interrupted: same tokens, same rewards, nothing sampled twice."""

from __future__ import annotations

import asyncio

import chat_tokenizers as made
import msgspec
import numpy as np
import pytest
from fake_scheduler import Record
from node_world import World, config, run

from segue.episode import Outcome, Task
from segue.ports.engine import EngineDead, GenerateRequest
from segue.ports.rollout import Fail, ParkOrder, Resumed

TASK = Task("task", "talk", 5, {"turns": 4})


def whole(snapshot_every: int = 1, task: Task = TASK) -> Record:
    """The episode without any interruption."""

    async def main() -> Record:
        async with World(snapshot_every=snapshot_every) as w:
            await w.lease(0, task=task)
            return await w.scheduler.finished(0)

    return run(main())


def same(found: Record, expected: Record) -> None:
    a, b = found.log(), expected.log()
    a.validate()
    for field in ("tokens", "mask", "logprobs", "versions", "kv_versions"):
        assert np.array_equal(getattr(a, field), getattr(b, field)), field
    assert a.segments == b.segments
    assert found.finish is not None and expected.finish is not None
    for field in ("outcome", "turns", "reward", "info"):
        assert getattr(found.finish, field) == getattr(expected.finish, field), field


@pytest.mark.parametrize("snapshot_every", [0, 1, 3])
def test_going_on_from_every_delta(snapshot_every: int) -> None:
    """Split at every turn and every part of a turn; the new node rebuilds the environment by snapshot or by replay."""
    expected = whole(snapshot_every)

    async def main(accepted: int) -> World:
        w = World(snapshot_every=snapshot_every)
        async with w:
            lease = w.scheduler.lease(0, task=TASK)
            record = w.scheduler.episodes[0]
            record.deltas = expected.deltas[:accepted]
            await w.scheduler.push(w.node.name, msgspec.structs.replace(lease, snapshot=record.snapshot()))
            same(await w.scheduler.finished(0), expected)
            sampled_before = sum(int(b.log.mask.sum()) for b in expected.bodies()[:accepted])
            assert w.node.engine.decoded == int(expected.log().mask.sum()) - sampled_before, "nothing is sampled twice"
        return w

    for accepted in range(len(expected.deltas) + 1):
        w = run(main(accepted))
        steps = [s for _, _, s in w.pool.steps]
        recorded = sum(b.record is not None and b.record.turn >= 0 for b in expected.bodies()[:accepted])
        assert steps == list(range(recorded, 4)), "recorded turns are not stepped again"


@pytest.mark.parametrize("at", [0.55 + 0.033 * i for i in range(16)])
def test_a_node_that_dies_at_any_moment(at: float) -> None:
    """SIGKILL costs at most what was sampled since the last delta; the second node goes on from what was accepted."""
    expected = whole()

    async def main() -> None:
        async with World() as w:
            second = await w.add_node("rollout-1")
            await w.lease(0, task=TASK)
            start = asyncio.get_running_loop().time()
            await asyncio.sleep(at - 0.55)
            if w.scheduler.episodes[0].finish is None:
                w.node.up.disturb = w.node.down.disturb = lambda method, n: "lost"  # nothing comes or goes any more
                w.scheduler.sessions.pop(w.node.name)
                await w.lease(0, second)
            record = await w.scheduler.finished(0)
            same(record, expected)
            assert asyncio.get_running_loop().time() - start < 10.0

    run(main())


def test_parked_and_leased_again_is_the_same_episode() -> None:
    expected = whole()

    async def main() -> None:
        async with World() as w:
            second = await w.add_node("rollout-1")
            nodes = [w.node, second]
            await w.lease(0, task=TASK)
            record = w.scheduler.episodes[0]
            for round in range(100):
                await asyncio.sleep(0.07)
                if record.leased:
                    await w.scheduler.push(nodes[round % 2].name, ParkOrder(0, record.attempt))
                    await w.scheduler.until(0, lambda r: not r.leased)
                if record.finished:
                    break
                assert w.pool.instances == {}, "nothing is held"
                await w.lease(0, nodes[(round + 1) % 2])
            assert record.parked >= 3
            same(record, expected)
            assert any(isinstance(e, Resumed) for e in w.scheduler.events), "some park came in the middle of a turn"

    run(main())


def test_a_log_that_is_complete_only_needs_its_finish() -> None:
    """The node died between the last record and `Finish`: no environment is built, nothing is sampled."""
    expected = whole()

    async def main() -> None:
        async with World() as w:
            w.scheduler.lease(0, task=TASK)
            w.scheduler.episodes[0].deltas = list(expected.deltas)
            await w.lease(0)
            record = await w.scheduler.finished(0)
            assert record.finish is not None and record.finish.outcome == Outcome.TERMINATED
            assert w.node.engine.requests == [] and w.pool.submits == []

    run(main())


def test_wall_time_goes_on_where_it_was() -> None:
    expected = whole()

    async def main() -> None:
        async with World(config(rollout={"wall_seconds": 50.0})) as w:
            w.scheduler.lease(0, task=TASK)
            record = w.scheduler.episodes[0]
            record.deltas, record.seconds = list(expected.deltas[:3]), 49.99
            await w.lease(0)
            assert (await w.scheduler.finished(0)).finish.outcome == Outcome.TRUNCATED_WALL  # type: ignore[union-attr]
            assert record.log().tokens.tolist()[: len(expected.log())][:20] == expected.log().tokens.tolist()[:20]

    run(main())


def test_tokens_of_newer_weights_are_not_continued_under_older_ones() -> None:
    """Versions within a trajectory never decrease."""

    async def main() -> None:
        async with World() as w:
            await w.update()
            await w.update()
            await w.lease(0, task=TASK)
            record = await w.scheduler.finished(0)
            old = await w.add_node("rollout-1")
            assert old.engine.version == 3
            old.engine.version = 2
            record.deltas, record.finish = record.deltas[:3], None
            await w.lease(0, old)
            await w.scheduler.until(0, lambda r: not r.leased)
            assert (
                record.fails == [Fail(0, 2, "infra", "bad_log", "tokens of version 3 came to a node that runs 2")]
                and old.engine.requests == []
            )

    run(main())


def test_a_damaged_snapshot_fails_the_attempt() -> None:
    async def main() -> None:
        async with World() as w:
            lease = w.scheduler.lease(0, task=TASK)
            w.scheduler.episodes[0].deltas = [b"not a delta"]
            await w.scheduler.push(w.node.name, msgspec.structs.replace(lease, snapshot=w.scheduler.episodes[0].snapshot()))
            record = await w.scheduler.until(0, lambda r: not r.leased)
            assert record.fails == [
                Fail(0, 1, "infra", "bad_log", "delta 0 does not decode: these bytes are not a Segue message")
            ]

    run(main())


def test_a_replay_that_differs_is_an_environment_failure() -> None:
    expected = whole(snapshot_every=0)

    async def main() -> None:
        async with World(snapshot_every=0) as w:
            w.scheduler.lease(0, task=Task("another", "talk", 5, {"turns": 4}))
            w.scheduler.episodes[0].deltas = list(expected.deltas[:5])
            await w.lease(0)
            record = await w.scheduler.until(0, lambda r: not r.leased)
            assert record.fails == [Fail(0, 2, "env", "replay_mismatch", "another observation")]

    run(main())


def test_prefill_elsewhere_is_migration() -> None:
    expected = whole()

    async def main() -> None:
        async with World() as w:
            w.scheduler.lease(0, task=TASK)
            w.scheduler.episodes[0].deltas = list(expected.deltas[:5])
            await w.lease(0)
            await w.scheduler.finished(0)
            counts = w.node.shell.counts()
            log = expected.log()
            sampled = np.flatnonzero(log.mask)
            context = len(w.node.engine.requests[0].tokens)
            last = int(sampled[sampled < context][-1])
            assert counts["prefill_first"] == 0 and counts["prefill_migration"] == last
            assert (
                sum(v for k, v in counts.items() if k.startswith("prefill_") and k not in ("prefill_tokens", "prefill_seconds"))
                == (counts["prefill_tokens"])
            )

    run(main())


def test_the_engine_dying_ends_the_node_and_says_what_it_ran() -> None:
    """F60: a dead engine is the node's end, with its cause; its episodes are given back at once."""

    async def main() -> None:
        async with World() as w:
            for episode in range(3):
                await w.lease(episode)
            await asyncio.sleep(0.1)
            w.node.engine.die(EngineDead("the worker was killed"))
            with pytest.raises(EngineDead, match="the worker was killed"):
                await w.node.shell.run()
            for episode in range(3):
                record = await w.scheduler.until(episode, lambda r: not r.leased)
                assert [(f.failure, f.attempt) for f in record.fails] == [("infra", 1)]

    run(main())


@pytest.mark.parametrize("snapshot_every", [0, 1])
def test_what_completes_an_action_is_remembered_across_nodes(snapshot_every: int) -> None:
    """A rebuilt environment need not repeat its stop strings: they are in the log."""
    stop = made.words().convert_tokens_to_ids("</search>")
    task = Task("task", "talk", 5, {"turns": 3, "stop": ["</search>"]})

    def policy(request: GenerateRequest, index: int) -> int:
        return int(stop) if (index + 1) % 5 == 0 else 20 + index

    async def main(accepted: list[bytes]) -> Record:
        async with World(policy=policy, snapshot_every=snapshot_every) as w:
            lease = w.scheduler.lease(0, task=task)
            w.scheduler.episodes[0].deltas = list(accepted)
            await w.scheduler.push(w.node.name, msgspec.structs.replace(lease, snapshot=w.scheduler.episodes[0].snapshot()))
            return await w.scheduler.finished(0)

    expected = run(main([]))
    assert [s.length for s in expected.log().segments if s.author == 2] == [6, 6, 6]
    for accepted in range(1, len(expected.deltas)):
        same(run(main(expected.deltas[:accepted])), expected)
