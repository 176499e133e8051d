"""The node and the scheduler when messages are lost, doubled, late or refused: nothing counts twice, nothing is lost."""

from __future__ import annotations

import asyncio
import itertools

import pytest
from node_world import World, config, run, until

from segue.clock import now
from segue.config import Config
from segue.episode import Task
from segue.errors import RunFailed
from segue.ports.engine import GenerateRequest
from segue.ports.rollout import Delta, Finish, Loaded

TASK = Task("task", "talk", 5, {"turns": 4})


def endless(request: GenerateRequest, index: int) -> int:
    return 20 + index % 7


def long() -> Config:
    return config(rollout={"max_turn_tokens": 1000, "max_tokens": 9000, "wall_seconds": 600.0})


FATES = {
    "every third reply lost": lambda method, n: "unanswered" if n % 3 == 0 else "",
    "every second call lost": lambda method, n: "unsent" if n % 2 == 0 else "",
    "all doubled": lambda method, n: "twice",
    "a bad line": lambda method, n: ("", "lost", "unanswered", "", "twice", "unsent", "")[n % 7],
}


@pytest.mark.parametrize("fate", FATES)
def test_a_bad_line_changes_nothing_but_the_time(fate: str) -> None:
    async def main(disturbed: bool) -> list[tuple[list[int], float]]:
        async with World() as w:
            if disturbed:
                w.node.up.disturb = FATES[fate]
            for episode in range(5):
                await w.lease(episode, task=Task(f"t{episode}", "talk", episode, {"turns": 4}))
            result = []
            for episode in range(5):
                record = await w.scheduler.finished(episode)
                assert record.finish is not None and record.finish.attempt == 1 and w.scheduler.refused == 0
                result.append((record.log().tokens.tolist(), record.finish.reward))
            numbers = [e.number for e in w.scheduler.exchanges]
            assert numbers == list(range(1, len(numbers) + 1)), "each exchange counts once"
            seqs = [(e.head.episode, e.head.seq) for e in w.scheduler.events if isinstance(e, Delta)]
            assert len(seqs) == len(set(seqs))
            return result

    assert run(main(True)) == run(main(False))


def test_an_exchange_is_sent_again_unchanged() -> None:
    async def main() -> None:
        async with World() as w:
            sent: list[bytes] = []
            handle = w.node.up._handle

            async def spy(method: str, body: bytes) -> bytes:
                sent.append(body)
                return await handle(method, body)  # type: ignore[no-any-return]

            w.node.up._handle = spy
            w.node.up.disturb = lambda method, n: "unanswered" if len(sent) in (1, 2) else ""
            await w.lease(0, task=TASK)
            await w.scheduler.finished(0)
            assert sent[1] == sent[2] and sent[0] != sent[1]
            assert w.node.metrics.value("segue_rpc_failures_total", reason="timeout") >= 2

    run(main())


def test_messages_grow_with_time_not_with_episodes() -> None:
    """The load rule: whatever ends or pauses, a node sends one exchange per flush interval (and one per update)."""

    async def main(episodes: int) -> None:
        cfg = config(rollout={"max_episodes": 64, "nodes": 1})
        async with World(cfg) as w:
            w.scheduler.flush_after = 0.5
            for episode in range(episodes):
                await w.lease(episode, task=TASK)
            began, before = now(), len(w.scheduler.exchanges)
            for episode in range(episodes):
                await w.scheduler.finished(episode)
            assert len(w.scheduler.exchanges) - before <= (now() - began) / 0.5 + 2

    for episodes in (5, 60):
        run(main(episodes))


def test_a_quiet_node_renews_its_leases() -> None:
    async def main() -> None:
        async with World(config(envpool={"step_seconds": 100.0}), latency=60.0) as w:
            await w.lease(0, task=TASK)
            before = len(w.scheduler.received)
            began = now()
            await w.scheduler.finished(0)
            times = [at for at, _ in w.scheduler.received[before - 1 :]]
            assert max(b - a for a, b in itertools.pairwise(times)) <= 15.0 / 3 + 0.01
            assert w.scheduler.sessions[w.node.name] == 1 and now() - began > 200

    run(main())


def test_the_nodes_leases_end_before_the_schedulers() -> None:
    """A node that is not heard stops by its own clock at 0.8 of the lease, discards, and joins again under a new session."""

    async def main() -> None:
        async with World(long(), policy=endless) as w:
            await w.lease(0, task=TASK)
            await asyncio.sleep(2.0)
            last_heard = w.scheduler.received[-1][0]
            w.node.up.disturb = lambda method, n: "unsent"
            await until(lambda: not w.node.shell._running)
            assert last_heard + 0.8 * 15 - 0.1 <= now() <= last_heard + 0.8 * 15 + 0.1
            assert w.node.engine._open == {} and w.pool.instances == {}
            decoded = w.node.engine.decoded
            await asyncio.sleep(5.0)
            assert w.node.engine.decoded == decoded, "nothing goes on without a lease"
            assert w.node.metrics.value("segue_leases_lost_total") == 1
            accepted = sum(int(b.log.mask.sum()) for b in w.scheduler.episodes[0].bodies())
            assert w.node.metrics.value("segue_discarded_tokens_total", reason="fenced") == decoded - accepted > 0
            w.node.up.disturb = lambda method, n: ""
            await w.scheduler.until_joined(w.node.name, 2)
            loaded = await w.update(version=1)
            assert loaded == Loaded(2, 1, 0.5, 0.0, 0.0), "it still has these weights"
            await w.lease(0)
            await asyncio.sleep(1.0)
            assert w.node.engine.requests[-1].id.startswith("0.2.")

    run(main())


def test_a_fenced_node_discards_and_joins_again() -> None:
    async def main() -> None:
        async with World() as w:
            for episode in range(4):
                await w.lease(episode, task=TASK)
            await asyncio.sleep(0.25)
            w.scheduler.fence(w.node.name)
            fenced = now()
            await w.scheduler.until_joined(w.node.name, 2)
            assert now() - fenced < 1.0, "at its next exchange, not when its own clock ends the leases"
            await until(lambda: not w.node.shell._running and not w.pool.instances)
            assert w.node.engine._open == {}
            await w.update(version=1)
            for episode in range(4):
                await w.lease(episode)
                record = await w.scheduler.finished(episode)
                assert record.finish is not None and record.finish.attempt == 2
            sessions = [e.session for e in w.scheduler.exchanges]
            assert sessions == sorted(sessions) and set(sessions) == {1, 2}

    run(main())


def test_an_update_of_an_old_session_says_nothing_in_the_new_one() -> None:
    async def main() -> None:
        async with World() as w:
            w.node.receiver.seconds, w.node.engine.load_seconds = 0.0, 8.0
            await w.begin_update()
            await asyncio.sleep(0.005)
            assert w.node.engine._paused
            w.scheduler.fence(w.node.name)
            await w.scheduler.until_joined(w.node.name, 2)
            assert w.node.engine._paused
            await asyncio.sleep(10.0)
            assert w.scheduler.loads == [] and w.node.engine.version == 2 and not w.node.engine._paused

    run(main())


def test_a_refused_attempt_is_stopped() -> None:
    """Fencing by attempt: what arrives under an old attempt is refused, and the node stops it."""

    async def main() -> None:
        async with World() as w:
            second = await w.add_node("rollout-1")
            await w.lease(0, task=TASK)
            await asyncio.sleep(0.2)
            await w.lease(0, second)
            record = await w.scheduler.finished(0)
            assert record.finish is not None and record.finish.attempt == 2
            assert w.scheduler.refused >= 1 and not w.node.shell._running
            assert not any(isinstance(e, Finish) and e.attempt == 1 for e in w.scheduler.events)
            assert w.node.engine._open == {}

    run(main())


def test_gaps_are_filled() -> None:
    """A scheduler that lacks deltas asks for them, and gets them and everything after them, the finish included."""

    async def main() -> None:
        async with World() as w:
            lost: set[int] = set()

            def forget(delta: Delta) -> bool:
                seq = delta.head.seq
                if seq in (1, 4) and seq not in lost:
                    lost.add(seq)
                    return True
                return False

            w.scheduler.forget_deltas = forget
            await w.lease(0, task=TASK)
            record = await w.scheduler.finished(0)
            assert lost == {1, 4} and record.finish is not None and record.finish.next_seq == len(record.deltas)
            for body in record.bodies():
                body.log.validate()

    run(main())


def test_a_scheduler_that_never_answers_ends_the_node_with_its_name() -> None:
    async def main() -> None:
        cfg = config(cluster={"start_seconds": 30.0})
        w = World(cfg, nodes=0)
        joining = asyncio.create_task(w.add_node("rollout-0"))
        await asyncio.sleep(0)
        await until(lambda: bool(w.nodes))
        w.node.up.disturb = lambda method, n: "lost"
        began = now()
        with pytest.raises(RunFailed, match="did not let this node join within 30 s") as failed:
            await w.node.shell.run()
        assert failed.value.part == "scheduler" and now() - began <= 31.0
        joining.cancel()
        await w.node.shell.stop()

    run(main())


def test_a_dead_task_ends_the_node_with_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    """F60: nothing dies unheard."""

    async def main() -> None:
        async with World() as w:

            def broken(settled: object) -> None:
                raise ZeroDivisionError("a mistake of ours")

            monkeypatch.setattr(w.node.shell._exchange, "_settled", broken)
            with pytest.raises(ZeroDivisionError, match="a mistake of ours"):
                await w.node.shell.run()

    run(main())
