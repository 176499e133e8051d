"""Orders at every moment of an episode: drop, park, slices, newer attempts; and that each is carried out once."""

from __future__ import annotations

import asyncio

import pytest
from fake_engine import FakeEngine
from fake_scheduler import Record
from node_world import World, config, renderer, run, until

from segue.clock import now
from segue.episode import Task
from segue.ports.driver import NODE_STATUS, GetStatus
from segue.ports.engine import EngineDead, GenerateRequest
from segue.ports.envpool import Resume
from segue.ports.rollout import ORDERS, Drop, Extend, Finish, Orders, Parked, ParkOrder, SliceUsed, Stop
from segue.ports.rpc import ask

TASK = Task("task", "talk", 5, {"turns": 3})


def endless(request: GenerateRequest, index: int) -> int:
    return 20 + index % 7


def nothing_held(w: World, may_return: bool = False) -> None:
    """KV of an episode that may come back stays until somebody needs the room."""
    assert w.pool.instances == {} and w.node.engine._open == {} and (may_return or w.node.engine._kv == {})
    assert w.node.shell._running == {} and w.node.shell._gate.running == w.node.shell._gate.episodes == 0


@pytest.mark.parametrize("order", ["drop", "park"])
def test_an_order_at_every_moment(order: str) -> None:
    """While the environment is made, while it generates, while it steps: nothing is left behind; a park loses no token."""

    async def main(wait: float) -> tuple[str, Record]:
        async with World() as w:
            await w.lease(0, task=TASK)
            await asyncio.sleep(wait)
            record = w.scheduler.episodes[0]
            await w.scheduler.push(w.node.name, Drop(0, 1, "redundant") if order == "drop" else ParkOrder(0, 1))
            await w.scheduler.until(0, lambda r: not r.leased)
            await until(lambda: not w.node.shell._running)
            await asyncio.sleep(1.0)
            nothing_held(w, may_return=bool(record.parked))
            if order == "park" and not record.finished:
                assert w.node.engine.decoded == sum(int(b.log.mask.sum()) for b in record.bodies())
                parked = next(e for e in w.scheduler.events if isinstance(e, Parked))
                assert parked.next_seq == len(record.deltas)
            if order == "drop":
                lost = w.node.metrics.value("segue_discarded_tokens_total")
                accepted = sum(int(b.log.mask.sum()) for b in record.bodies())
                assert w.node.engine.decoded - accepted == lost
            kept = w.node.shell.counts()
            assert kept["prefill_tokens"] == sum(w.node.shell._ledger.prefilled.values()) == w.node.engine.prefill
            return (
                "finished" if record.finished else "parked" if record.parked else "dropped" if record.discarded else "?"
            ), record

    ends = [run(main(0.017 * i))[0] for i in range(32)]
    assert set(ends) == {"finished", "parked" if order == "park" else "dropped"}
    assert ends.index("finished") > 15


def test_a_park_waits_for_a_running_step_so_that_no_step_runs_twice() -> None:
    async def main() -> None:
        async with World(latency=2.0) as w:
            await w.lease(0, task=TASK)
            await until(lambda: len(w.pool.steps) == 1)
            await w.scheduler.push(w.node.name, ParkOrder(0, 1))
            record = await w.scheduler.until(0, lambda r: not r.leased)
            last = record.bodies()[-1].record
            assert last is not None and last.turn == 0
            await w.lease(0)
            await w.scheduler.finished(0)
            assert [s for _, _, s in w.pool.steps] == [0, 1, 2]

    run(main())


@pytest.mark.parametrize("at", [0.55 + 0.05 * i for i in range(12)])
def test_an_episode_whose_environment_is_pinned_is_never_let_go_of_once_it_has_taken_a_step(at: float) -> None:
    """Parked it could only begin anew: every token of it would be lost, and long episodes more often than short ones."""

    async def main() -> None:
        async with World(resume=Resume.PINNED) as w:
            await w.lease(0, task=TASK)
            await asyncio.sleep(at - 0.55)
            stepped = len(w.pool.steps)
            await w.scheduler.push(w.node.name, ParkOrder(0, 1))
            record = await w.scheduler.until(0, lambda r: not r.leased)
            assert stepped == 0 or not record.parked
            if record.parked:
                assert w.pool.steps == [], "only a reset was lost"
                await w.lease(0)
            assert (await w.scheduler.finished(0)).fails == []
            assert [s for _, _, s in w.pool.steps] == [0, 1, 2]

    run(main())


def test_an_episode_that_cannot_be_parked_does_not_say_that_its_slice_is_used_up() -> None:
    async def main(resume: Resume) -> int:
        async with World(config(rollout={"max_turn_tokens": 40}), policy=endless, resume=resume) as w:
            await w.lease(0, task=TASK, slice_tokens=10)
            await w.scheduler.finished(0)
            return w.scheduler.events.count(SliceUsed(0, 1))

    assert [run(main(resume)) for resume in Resume] == [1, 1, 0]


def test_an_order_for_an_attempt_the_node_does_not_have() -> None:
    async def main() -> None:
        async with World() as w:
            w.scheduler.lease(0, task=TASK)
            await w.scheduler.push(w.node.name, ParkOrder(0, 1), Extend(0, 1, 5), Drop(0, 1, "stale"))
            record = await w.scheduler.until(0, lambda r: r.discarded == 1)
            assert not record.parked

    run(main())


def test_slices_are_reported_once_and_the_episode_goes_on() -> None:
    async def main() -> None:
        async with World(config(rollout={"max_turn_tokens": 40}), policy=endless) as w:
            await w.lease(0, task=TASK, slice_tokens=10)
            await asyncio.sleep(0.4)
            assert w.scheduler.events.count(SliceUsed(0, 1)) == 1
            assert w.node.engine.decoded > 20, "it goes on until it is told otherwise"
            await w.scheduler.push(w.node.name, Extend(0, 1, 60))
            await asyncio.sleep(0.15)
            assert w.scheduler.events.count(SliceUsed(0, 1)) == 1
            await w.scheduler.finished(0)
            assert w.scheduler.events.count(SliceUsed(0, 1)) == 2

    run(main())


def test_a_dropped_attempt_says_nothing_more() -> None:
    """Not even about the tokens that the engine hands over when its request ends."""

    async def main() -> None:
        engine = FakeEngine(endless, renderer().text, chunk=10_000)
        async with World(config(rollout={"max_turn_tokens": 100}), nodes=0) as w:
            await w.add_node("rollout-0", engine=engine)
            await w.lease(0, task=TASK, slice_tokens=5)
            await asyncio.sleep(0.3)
            assert engine.decoded > 10
            await w.scheduler.push(w.node.name, Drop(0, 1, "redundant"))
            await w.scheduler.until(0, lambda r: r.discarded == 1)
            assert SliceUsed(0, 1) not in w.scheduler.events

    run(main())


@pytest.mark.parametrize("deaf_seconds", [5.0, 1e6])
def test_an_abort_that_the_engine_does_not_hear_is_repeated_and_not_for_ever(deaf_seconds: float) -> None:
    """F19, F20: an abort may come before the engine knows the request; one that never takes effect is the engine's death."""

    async def main() -> None:
        async with World(config(rollout={"max_turn_tokens": 20_000, "max_tokens": 30_000}), policy=endless) as w:
            await w.lease(0, task=TASK)
            await asyncio.sleep(0.3)
            w.node.engine.deaf_to_aborts = True
            began = now()
            await w.scheduler.push(w.node.name, Drop(0, 1, "redundant"))
            if deaf_seconds < 60.0:
                await asyncio.sleep(deaf_seconds)
                w.node.engine.deaf_to_aborts = False
                await w.scheduler.until(0, lambda r: r.discarded == 1)
                assert now() - began < deaf_seconds + 3.0
            else:
                with pytest.raises(EngineDead, match=r"did not end request 0\.1\.1 within 60 s"):
                    await w.node.shell.run()
                assert now() - began < 65.0

    run(main())


def test_a_slice_counts_this_lease_only() -> None:
    async def main() -> None:
        async with World(config(rollout={"max_turn_tokens": 40}), policy=endless) as w:
            await w.lease(0, task=TASK, slice_tokens=30)
            await asyncio.sleep(0.25)
            await w.scheduler.push(w.node.name, ParkOrder(0, 1))
            record = await w.scheduler.until(0, lambda r: not r.leased)
            before = sum(int(b.log.mask.sum()) for b in record.bodies())
            assert 10 < before < 30
            await w.lease(0, slice_tokens=30)
            await asyncio.sleep(0.05 + 0.25)
            assert SliceUsed(0, 2) not in w.scheduler.events
            await w.scheduler.finished(0)
            assert w.scheduler.events.count(SliceUsed(0, 2)) == 1

    run(main())


def test_a_newer_attempt_takes_the_place_of_an_older_one() -> None:
    async def main() -> None:
        async with World() as w:
            await w.lease(0, task=TASK)
            await asyncio.sleep(0.2)
            await w.lease(0)
            record = await w.scheduler.finished(0)
            assert record.finish is not None and record.finish.attempt == 2
            assert not any(isinstance(e, Finish) and e.attempt == 1 for e in w.scheduler.events)
            assert {key[1] for key in w.pool.replies} == {1, 2}
            await asyncio.sleep(1.0)
            nothing_held(w)

    run(main())


def test_an_older_attempt_is_ignored() -> None:
    async def main() -> None:
        async with World() as w:
            first = w.scheduler.lease(0, task=TASK)
            second = w.scheduler.lease(0)
            await w.scheduler.push(w.node.name, second)
            await w.scheduler.push(w.node.name, first)
            await w.scheduler.push(w.node.name, second)
            record = await w.scheduler.finished(0)
            assert record.finish is not None and record.finish.attempt == 2
            assert {key[1] for key in w.pool.replies} == {2}
            assert w.node.metrics.value("segue_messages_refused_total", reason="stale_attempt") == 2

    run(main())


def test_orders_that_arrive_twice_are_carried_out_once() -> None:
    async def main() -> None:
        async with World() as w:
            w.node.down.disturb = lambda method, n: ("twice", "unanswered", "unsent")[n % 3]
            for episode in range(6):
                await w.lease(episode, task=TASK)
            for episode in range(6):
                await w.scheduler.finished(episode)
            assert len([r for r in w.node.engine.requests if r.id.endswith(".1")]) == 6
            assert w.node.metrics.value("segue_messages_refused_total", reason="duplicate") >= 2

    run(main())


def test_orders_with_a_gap_or_of_another_session_are_left_out() -> None:
    async def main() -> None:
        async with World() as w:
            shell, session = w.node.shell, w.scheduler.sessions[w.node.name]
            lease = w.scheduler.lease(0, task=TASK)
            ahead = await ask(w.node.down, ORDERS, Orders(w.node.name, session, 5, [lease]), 1.0)
            assert ahead.upto == 1 and not shell._running, "one order (the update) was seen so far"
            old = await ask(w.node.down, ORDERS, Orders(w.node.name, session - 1, 1, [lease]), 1.0)
            assert (old.session, old.upto) == (session, 1) and not shell._running
            assert w.node.metrics.value("segue_messages_refused_total", reason="stale_session") == 1
            # Half of a batch was seen before: the rest is carried out.
            other = w.scheduler.lease(1, task=TASK)
            await ask(w.node.down, ORDERS, Orders(w.node.name, session, 1, [lease]), 1.0)
            seen = await ask(w.node.down, ORDERS, Orders(w.node.name, session, 1, [lease, other]), 1.0)
            assert seen.upto == 3 and len(shell._running) == 2

    run(main())


def test_told_to_stop_the_node_stops_its_work() -> None:
    async def main() -> None:
        async with World(config(rollout={"max_turn_tokens": 100, "max_tokens": 2000}), policy=endless) as w:
            for episode in range(3):
                await w.lease(episode, task=TASK)
            await asyncio.sleep(0.2)
            await w.scheduler.push(w.node.name, Stop("the run is over"))
            for episode in range(3):
                assert (await w.scheduler.until(episode, lambda r: not r.leased)).discarded == 1
            nothing_held(w)
            assert not w.node.shell.failed.done()

    run(main())


def test_stop_leaves_no_task_behind() -> None:
    async def main() -> None:
        before = asyncio.all_tasks()
        async with World() as w:
            for episode in range(4):
                await w.lease(episode, task=TASK)
            await asyncio.sleep(0.13)
            await w.begin_update()
            await asyncio.sleep(0.1)
        await w.node.shell.run()
        w.pool.tasks.clear()
        left = {t for t in asyncio.all_tasks() - before if not (t.get_coro().__qualname__.startswith("FakePool"))}  # type: ignore[union-attr]
        assert not left and w.node.receiver.closed

    run(main())


def test_status_tells_what_the_node_does() -> None:
    async def main() -> None:
        async with World() as w:
            await w.lease(0, task=TASK)
            await w.scheduler.finished(0)
            status = (await ask(w.node.down, NODE_STATUS, GetStatus(), 1.0)).data
            assert (status["name"], status["session"], status["version"]) == ("rollout-0", 1, 1)
            assert status["counts"]["prefill_first"] > 0
            assert status["prefill_seconds"]["first"] == pytest.approx(status["counts"]["prefill_first"] * 0.001)

    run(main())
