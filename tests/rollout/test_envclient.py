"""A node's calls to env pools: coalesced, matched, bounded in time, and never answered by somebody else's reply."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from fake_pool import FakePool
from node_world import Line, run, until

from rollout.envclient import EnvCallFailed, EnvClient
from rollout.tasks import Tasks
from segue.clock import now
from segue.config.envpool import EnvPoolConfig
from segue.episode import Task
from segue.metrics import Metrics
from segue.ports.envpool import Create, Created, EnvDeliver, Step, Stepped
from segue.ports.rpc import Done

TASK = Task("t", "talk", 1, {"turns": 100})


class Client:
    """A client with `pools` fake pools behind lines."""

    def __init__(self, pools: int = 1, latency: float = 0.05, patience: Callable[[], float] = lambda: 0.0) -> None:
        self.metrics = Metrics("rollout", "0", envs=("talk",))
        self.deaths: list[BaseException] = []
        self.tasks = Tasks(lambda name, error: self.deaths.append(error))
        self.client = EnvClient("rollout-0", EnvPoolConfig(step_seconds=10.0), self.metrics, self.tasks.spawn, patience)
        self.client.begin(1)
        self.pools = [FakePool(f"envpool-{i}", latency) for i in range(pools)]
        self.lines = [Line(pool.name, pool.service.handle) for pool in self.pools]
        for pool, line in zip(self.pools, self.lines, strict=True):
            pool.nodes["rollout-0"] = self
            self.client.connect(pool.name, line)

    name = "rollout-0"
    session = 1

    async def call(self, method: str, body: bytes, timeout: float) -> bytes:
        from segue import wire

        return wire.encode(await self.client.deliver(wire.decode(body, EnvDeliver)))

    def create(self, episode: int, attempt: int = 1) -> asyncio.Future[Created]:
        return self.client.create(Create(episode, attempt, TASK, 0))

    def refused(self, reason: str) -> float:
        return self.metrics.value("segue_messages_refused_total", reason=reason)


def virtual(body: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    """A test on a logical clock."""

    def inner() -> None:
        async def main() -> None:
            await body()

        run(main())

    inner.__name__, inner.__doc__ = body.__name__, body.__doc__
    return inner


@virtual
async def test_calls_gather_while_their_answers_would_only_wait() -> None:
    patience = [0.5]
    c = Client(latency=0.0, patience=lambda: patience[0])
    began = now()
    await c.create(0)
    assert now() == began  # nothing was sent shortly before: the first call goes at once
    waiting = [c.create(1)]
    await asyncio.sleep(0.3)
    waiting += [c.create(2), c.create(3)]
    await asyncio.gather(*waiting)
    assert now() == began + 0.5 and [len(s.requests) for s in c.pools[0].submits] == [1, 3]
    assert [s.patience for s in c.pools[0].submits] == [0.5, 0.5]
    patience[0] = 0.0
    await c.create(4)
    assert now() == began + 0.5 and c.pools[0].submits[-1].patience == 0.0


@virtual
async def test_what_is_dropped_while_calls_gather_is_asked_of_nobody() -> None:
    c = Client(latency=0.0, patience=lambda: 0.5)
    await c.create(0)
    dropped = c.create(1)
    await asyncio.sleep(0.1)
    c.client.close(1, 1)
    await asyncio.sleep(1.0)
    assert dropped.cancelled() and len(c.pools[0].submits) == 1 and not c.deaths


@virtual
async def test_calls_made_together_travel_together() -> None:
    c = Client()
    created = await asyncio.gather(*(c.create(e) for e in range(20)))
    assert len(c.pools[0].submits) <= 2 and {r.episode for r in created} == set(range(20))
    await asyncio.gather(*(c.client.step(Step(e, 1, 0, "look")) for e in range(20)))
    assert len(c.pools[0].submits) <= 4


@virtual
async def test_replies_are_matched_whatever_their_order() -> None:
    """F74."""
    c = Client()
    await asyncio.gather(*(c.create(e) for e in range(8)))
    c.pools[0].slow = lambda e, a, s: 0.1 * ((7 * e) % 8)
    replies = await asyncio.gather(*(c.client.step(Step(e, 1, 0, f"action {e}")) for e in range(8)))
    assert [r.episode for r in replies] == list(range(8))
    assert [c.pools[0].replies[(e, 1, 0)] for e in range(8)] == replies


@virtual
async def test_a_late_reply_is_refused_and_the_next_call_gets_its_own() -> None:
    """F74: after a timeout nothing is shifted by one."""
    c = Client()
    await c.create(0)
    deadline = 2 * 10.0 + 10.0
    c.pools[0].slow = lambda e, a, s: deadline + 5.0 if s == 0 else 0.0
    began = now()
    with pytest.raises(EnvCallFailed, match="did not answer step 0 for 30 s") as failed:
        await c.client.step(Step(0, 1, 0, "look"))
    assert (failed.value.failure, failed.value.reason) == ("infra", "pool_silent") and now() - began == deadline
    answer = await c.client.step(Step(0, 1, 1, "look"))
    assert isinstance(answer, Stepped) and answer.step == 1
    await until(lambda: c.refused("unexpected") == 1)


@virtual
async def test_replies_of_another_session_are_refused() -> None:
    c = Client()
    await c.create(0)
    c.pools[0].slow = lambda e, a, s: 1.0
    waiting = c.client.step(Step(0, 1, 0, "look"))
    await asyncio.sleep(0.5)
    c.client.begin(2)
    await until(lambda: c.refused("stale_session") == 1)
    assert waiting.cancelled() and c.pools[0].instances == {}


@virtual
async def test_closing_frees_the_instance_and_cancels_who_waits() -> None:
    c = Client()
    await c.create(0)
    c.pools[0].slow = lambda e, a, s: 1.0
    waiting = c.client.step(Step(0, 1, 0, "look"))
    await asyncio.sleep(0.1)
    c.client.close(0, 1)
    c.client.close(0, 1)
    assert waiting.cancelled()
    await until(lambda: not c.pools[0].instances)
    await until(lambda: c.refused("unexpected") == 1)


@virtual
async def test_an_instance_closed_before_it_was_asked_for_is_never_made() -> None:
    c = Client()
    c.create(0)
    c.client.close(0, 1)
    await asyncio.sleep(1.0)
    assert c.pools[0].replies == {} and not c.deaths


@virtual
async def test_least_loaded_first_and_ties_rotate() -> None:
    """F52."""
    c = Client(pools=3)
    await asyncio.gather(*(c.create(e) for e in range(9)))
    assert [len(p.instances) for p in c.pools] == [3, 3, 3]
    for episode, attempt in list(c.pools[1].instances)[:2]:
        c.client.close(episode, attempt)
    await asyncio.gather(*(c.create(e) for e in range(9, 11)))
    assert [len(p.instances) for p in c.pools] == [3, 3, 3]
    firsts = set()
    for e in range(20, 26):
        await c.create(e)
        where = next(i for i, p in enumerate(c.pools) if (e, 1) in p.instances)
        firsts.add(where)
        c.client.close(e, 1)
    assert firsts == {0, 1, 2}


@virtual
async def test_acceptances_reach_the_pool_that_has_the_instance() -> None:
    c = Client(pools=2)
    await asyncio.gather(*(c.create(e) for e in range(4)))
    for e in range(4):
        c.client.accepted(e, 1, -1)
    c.client.accepted(99, 1, 0)
    submits = [len(p.submits) for p in c.pools]
    await asyncio.sleep(60.0)
    assert [len(p.submits) for p in c.pools] == submits, "nobody waits for them: they are no message of their own"
    await asyncio.gather(*(c.client.step(Step(min(p.instances)[0], 1, 0, "x")) for p in c.pools))
    for pool, before in zip(c.pools, submits, strict=True):
        assert {(e, a) for e, a, _ in pool.accepted} == set(pool.instances) and len(pool.submits) == before + 1


@virtual
async def test_a_submit_that_is_not_acknowledged_is_sent_again_and_counts_once() -> None:
    c = Client()
    c.lines[0].disturb = lambda method, n: ("unanswered", "unsent", "twice", "")[n % 4]
    await c.create(0)
    for step in range(6):
        await c.client.step(Step(0, 1, step, "look"))
    assert c.pools[0].steps == [(0, 1, s) for s in range(6)], "the pool's stored replies make a repetition harmless"
    assert c.metrics.value("segue_rpc_failures_total", reason="timeout") >= 3


@virtual
async def test_a_lost_pool_fails_its_steps_at_once_and_its_creates_go_elsewhere() -> None:
    """F70: a dead pool is an event, not a wait."""
    c = Client(pools=2)
    await asyncio.gather(*(c.create(e) for e in range(4)))
    lost = next(i for i, p in enumerate(c.pools) if (0, 1) in p.instances)
    c.pools[lost].slow = lambda e, a, s: 5.0
    waiting = c.client.step(Step(0, 1, 0, "look"))
    await asyncio.sleep(0.1)
    c.lines[lost].disturb = lambda method, n: "lost"
    began = now()
    creates = [c.create(e) for e in range(10, 14)]
    made = await asyncio.gather(*creates)
    assert len(made) == 4 and now() - began < 1.0
    with pytest.raises(EnvCallFailed) as failed:
        await waiting
    assert (failed.value.failure, failed.value.reason) == ("infra", "pool_lost")
    assert all((e, 1) in c.pools[1 - lost].instances for e in range(10, 14))
    other = next(e for e in range(1, 4) if (e, 1) in c.pools[lost].instances)
    with pytest.raises(EnvCallFailed) as failed:
        await c.client.step(Step(other, 1, 0, "look"))
    assert failed.value.reason == "pool_lost"


@virtual
async def test_a_pool_that_was_given_up_has_no_say_any_more() -> None:
    """It was only slow: its instance is not the one that the episode's steps go to."""
    c = Client(pools=2)
    for pool in c.pools:
        pool.slow = lambda e, a, s: 40.0 if s < 0 else 0.0
    creating = c.create(0)
    c.lines[0].disturb = c.lines[1].disturb = lambda method, n: "unanswered"
    await until(lambda: any(line.calls for line in c.lines))
    slow = next(i for i, line in enumerate(c.lines) if line.calls)
    c.lines[1 - slow].disturb = lambda method, n: ""
    await until(lambda: c.refused("unexpected") == 1)
    assert not creating.done() and (0, 1) in c.pools[slow].instances
    await creating
    assert isinstance(await c.client.step(Step(0, 1, 0, "look")), Stepped)
    assert c.pools[1 - slow].steps == [(0, 1, 0)] and not c.pools[slow].steps


@virtual
async def test_creates_wait_for_the_only_pool_to_come_back() -> None:
    """A pool that is restarted must not cost an episode its retries."""
    c = Client()
    c.lines[0].disturb = lambda method, n: "lost"
    creating = c.create(0)
    await asyncio.sleep(20.0)
    assert not creating.done()
    fresh = FakePool("envpool-0")
    fresh.nodes["rollout-0"] = c
    c.client.connect("envpool-0", Line("envpool-0", fresh.service.handle))
    created = await creating
    assert created.episode == 0 and (0, 1) in fresh.instances
    assert not c.deaths


@virtual
async def test_creates_do_not_wait_for_ever() -> None:
    c = Client()
    c.lines[0].disturb = lambda method, n: "lost"
    began = now()
    with pytest.raises(EnvCallFailed, match="did not answer create for 130 s"):
        await c.create(0)
    assert now() - began == 130.0
    c.client.close(0, 1)
    calls = c.lines[0].calls["env_submit"]
    assert calls < 40, "attempts become rarer"
    await asyncio.sleep(100.0)
    assert c.lines[0].calls["env_submit"] <= calls + 1, "and end with what was wanted"


@virtual
async def test_a_pool_that_only_swallows_counts_as_lost() -> None:
    c = Client()
    await c.create(0)
    c.lines[0].disturb = lambda method, n: "unsent"
    began = now()
    with pytest.raises(EnvCallFailed) as failed:
        await c.client.step(Step(0, 1, 0, "look"))
    assert failed.value.reason in ("pool_lost", "pool_silent") and now() - began <= 30.0


@virtual
async def test_a_pool_that_refuses_a_submit_fails_what_was_in_it() -> None:
    c = Client()
    await c.create(0)

    async def broken(submit: Any) -> Done:
        raise RuntimeError("no room")

    c.pools[0].service._routes["env_submit"] = (c.pools[0].service._routes["env_submit"][0], broken)
    with pytest.raises(EnvCallFailed, match="no room") as failed:
        await c.client.step(Step(0, 1, 0, "look"))
    assert failed.value.reason == "pool_refused"


@virtual
async def test_a_failure_nobody_asks_about_any_more_is_no_error() -> None:
    c = Client()
    c.lines[0].disturb = lambda method, n: "lost"
    c.create(0)
    await asyncio.sleep(200.0)
    assert not c.deaths
