"""The pool's shell in one process on a logical clock: the same core, with workers that are no processes."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from pool_harness import FAULTY, Node, WatchedShell, a_task, make_config, running

from envpool.inprocess import InProcessWorkers
from envpool.suites import load_suite
from envpool.suites.latency import LatencyEnvironment
from segue.clock import LogicalLoop, now
from segue.config import Config
from segue.episode import ActionRecord, Task
from segue.errors import RunFailed, UserError
from segue.metrics.vocabulary import STATES
from segue.ports.envpool import (
    ENV_SUBMIT,
    POOL_STATUS,
    Close,
    Create,
    Created,
    EnvFailed,
    EnvSubmit,
    PoolStatusRequest,
    Restore,
    Step,
    Stepped,
    observation_digest,
)
from segue.ports.rpc import PeerLost, PeerTimeout, RemoteError, ask

T = TypeVar("T")
PATIENT = 1e9


def logical(coroutine: Coroutine[Any, Any, T]) -> T:
    """Run on a loop with a logical clock."""
    loop = LogicalLoop()
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.close()


def latency(config_args: dict[str, Any], **envpool: Any) -> Config:
    return make_config("latency", config_args, **envpool)


def task_of(config: Config, number: int = 0) -> Task:
    return load_suite(config.task.env, config.task.args).tasks("train", number + 1, 0)[number]


def test_modelled_latencies_pass_on_the_loops_clock_and_are_those_a_process_would_sleep() -> None:
    config = latency(
        {"turns_min": 5, "turns_max": 5, "distribution": "lognormal", "mean": 3.0, "spread": 1.0, "reset_seconds": 2.0}
    )
    task = task_of(config)

    async def play() -> list[float]:
        async with running(config, InProcessWorkers.of(config)) as shell:
            node = Node(shell, patience=PATIENT)
            start = now()
            created = await node.create(1, task=task, member=2)
            assert created.seconds == pytest.approx(2.0) and now() - start == pytest.approx(2.0)
            seconds = []
            for step in range(5):
                start = now()
                reply = await node.step(1, step, "x")
                seconds.append(now() - start)
                assert reply.seconds == pytest.approx(seconds[-1])
            return seconds

    environment = load_suite("latency", config.task.args).make(task, 2)
    assert isinstance(environment, LatencyEnvironment)
    environment.defer()
    environment.reset(task, task.seed)
    expected = []
    for _ in range(5):
        environment.step("x")
        expected.append(environment.owed())
    assert logical(play()) == pytest.approx(expected)


def test_an_environment_may_run_an_event_loop_of_its_own() -> None:
    """F80: as it may in a worker process."""
    config = make_config(FAULTY)

    async def play() -> str:
        async with running(config, InProcessWorkers.of(config)) as shell:
            node = Node(shell, patience=PATIENT)
            await node.create(1)
            return (await node.step(1, 0, "asyncio")).result.observation.messages[0].content

    assert logical(play()) == "1: ran"


def test_steps_of_many_instances_overlap_in_logical_time() -> None:
    config = latency({"turns_min": 1, "turns_max": 1, "mean": 7.0}, workers=2, instances=50)

    async def play() -> float:
        async with running(config, InProcessWorkers.of(config)) as shell:
            node = Node(shell, patience=PATIENT)
            for episode in range(100):
                await node.create(episode, task=task_of(config))
            start = now()
            await asyncio.gather(*(node.step(episode, 0, "x") for episode in range(100)))
            assert node.deliveries < 150
            return now() - start

    assert logical(play()) == pytest.approx(7.0)


@pytest.mark.parametrize(
    ("args", "reason", "after"),
    [
        ({"hang": 1.0}, "step_timeout", 30.0),
        ({"crash": 1.0}, "worker_died", 0.0),
        ({"exception": 1.0}, "env_error", 0.0),
        ({"mean": 31.0}, "step_timeout", 30.0),
    ],
)
def test_faults_end_as_they_would_in_a_process(args: dict[str, Any], reason: str, after: float) -> None:
    config = latency(args, workers=1, instances=2)

    async def play() -> None:
        async with running(config, InProcessWorkers.of(config)) as shell:
            node = Node(shell, patience=PATIENT)
            await node.create(1, task=task_of(config))
            await node.create(2, task=task_of(config))
            start = now()
            assert (await node.fails(Step(1, 1, 0, "x"))).reason == reason
            assert now() - start == pytest.approx(after)
            if reason == "env_error":
                await node.close(2)
            else:
                assert (await node.fails(Step(2, 1, 0, "x"))).reason == "worker_killed"
            await shell.until_free()
            await node.create(1, attempt=2, task=task_of(config))

    logical(play())


def test_slow_resets_meet_their_deadline() -> None:
    config = latency({"slow_reset": 1.0, "slow_reset_seconds": 31.0}, workers=1, instances=1)

    async def play() -> None:
        async with running(config, InProcessWorkers.of(config)) as shell:
            node = Node(shell, patience=PATIENT)
            assert (await node.fails(Create(1, 1, task_of(config), 0))).reason == "reset_timeout"

    logical(play())


async def storm(config: Config, episodes: int) -> tuple[list[Any], float, dict[str, Any]]:
    """Many episodes on a pool full of faults, each retried until it is done: the trace, and what the pool counted."""
    trace: list[Any] = []
    async with running(config, InProcessWorkers.of(config)) as shell:
        node = Node(shell, patience=PATIENT)

        async def live(episode: int) -> None:
            records: list[ActionRecord] = []
            snapshot: bytes | None = None
            taken = -1
            for attempt in range(1, 200):
                restore = Restore(snapshot, taken, records[taken + 1 :]) if attempt > 1 else None
                reply = await node.call(Create(episode, attempt, task_of(config, episode), episode % 4, restore))
                while not isinstance(reply, EnvFailed):
                    if isinstance(reply, Stepped):
                        records.append(ActionRecord("x", observation_digest(reply.result.observation)))
                    if reply.snapshot is not None:
                        snapshot, taken = reply.snapshot, len(records) - 1
                    await node.accepted(episode, len(records) - 1, attempt)
                    if isinstance(reply, Stepped) and reply.result.terminated:
                        await node.close(episode, attempt)
                        return
                    reply = await node.call(Step(episode, attempt, len(records), "x"))
                trace.append((round(now(), 9), episode, attempt, reply.step, reply.reason))
            raise AssertionError("never done")

        await asyncio.gather(*map(live, range(episodes)))
        end = now()
        await shell.until_free()
        seconds = {s: shell.metrics.value("segue_worker_state_seconds_total", state=s) for s in STATES["envpool"]}
        return trace, end, {"status": shell.status, "seconds": seconds}


@pytest.mark.parametrize("snapshots", [True, False])
def test_episodes_survive_a_storm_of_faults_and_two_runs_agree(snapshots: bool) -> None:
    """Every episode ends, whatever dies under it; two runs are equal to the last digit."""
    args = {"turns_min": 3, "turns_max": 6, "distribution": "lognormal", "mean": 2.0, "spread": 0.5, "snapshots": snapshots}
    args |= {"exception": 0.05, "hang": 0.02, "crash": 0.02, "slow_reset": 0.05, "slow_reset_seconds": 60.0}
    config = latency(args, workers=4, instances=4, respawns_per_minute=1000)
    first = logical(storm(config, 40))
    assert first == logical(storm(config, 40))
    trace, end, counted = first
    reasons = {entry[4] for entry in trace}
    assert {"env_error", "step_timeout", "worker_died", "worker_killed"} <= reasons
    assert sum(counted["seconds"].values()) == pytest.approx(16 * end, rel=1e-6)


def test_a_pool_without_faults_uses_no_time_of_its_own() -> None:
    config = make_config("search_qa", workers=1, instances=1)

    async def play() -> None:
        async with running(config, InProcessWorkers.of(config)) as shell:
            node = Node(shell, patience=PATIENT)
            task = task_of(config)
            suite = load_suite("search_qa")
            policy = suite.oracle(task)
            observation = (await node.create(1, task=task)).observation
            for step in range(4):
                reply = await node.step(1, step, policy(observation))
                observation = reply.result.observation
            assert reply.result.terminated and reply.result.reward == 1.0
            assert now() == 0.0

    logical(play())


def test_closing_the_pool_closes_the_instances(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    monkeypatch.setattr(LatencyEnvironment, "close", lambda self: closed.append(1))
    config = latency({})

    async def play() -> None:
        async with running(config, InProcessWorkers.of(config)) as shell:
            node = Node(shell, patience=PATIENT)
            await node.create(1, task=task_of(config))
            await node.create(2, task=task_of(config))

    logical(play())
    assert closed == [1, 1]


# --- the shell and its peers ------------------------------------------------------------------------------------------


def test_replies_to_an_old_session_are_dropped_and_its_instances_closed() -> None:
    config = latency({"mean": 5.0}, workers=1, instances=2)

    async def play() -> None:
        async with running(config, InProcessWorkers.of(config)) as shell:
            node = Node(shell, patience=PATIENT)
            await node.create(1, task=task_of(config))
            await node.submit(Step(1, 1, 0, "x"))
            node.session = 2
            await node.create(2, task=task_of(config))
            await asyncio.sleep(6.0)
            assert [type(reply) for reply in node.replies] == [Created, Created]
            assert shell.status["instances"]["idle"] == 1

    logical(play())


class Unreliable:
    """A peer whose calls fail in the given ways first, then reach the node."""

    def __init__(self, node: Node, failures: list[Exception], arrives: bool) -> None:
        self.name = node.name
        self._node = node
        self._failures = failures
        self._arrives = arrives

    async def call(self, method: str, body: bytes, timeout: float) -> bytes:
        if self._failures:
            failure = self._failures.pop(0)
            if self._arrives:
                await self._node.service.handle(method, body)
            if isinstance(failure, PeerTimeout):
                await asyncio.sleep(timeout)
            raise failure
        return await self._node.service.handle(method, body)


@pytest.mark.parametrize("arrives", [True, False])
@pytest.mark.parametrize("failure", [PeerTimeout("late"), PeerLost("away")])
def test_a_delivery_is_repeated_until_it_is_acknowledged(failure: Exception, arrives: bool) -> None:
    config = latency({})

    async def play() -> None:
        async with running(config, InProcessWorkers.of(config)) as shell:
            node = Node(shell, patience=PATIENT)
            shell.connect(node.name, Unreliable(node, [failure, failure], arrives))
            await node.submit(Create(1, 1, task_of(config), 0))
            await asyncio.sleep(12.0)
            assert len(node.replies) == (3 if arrives else 1)
            assert all(reply == node.replies[0] for reply in node.replies)
            reason = "timeout" if isinstance(failure, PeerTimeout) else "lost"
            assert shell.metrics.value("segue_rpc_failures_total", reason=reason) == 2
            await node.step(1, 0, "x")

    logical(play())


def test_a_node_that_takes_no_replies_loses_its_instances() -> None:
    config = latency({}, workers=1, instances=2)

    async def play() -> None:
        async with running(config, InProcessWorkers.of(config)) as shell:
            node = Node(shell, patience=PATIENT)
            await node.create(1, task=task_of(config))
            shell.connect(node.name, Unreliable(node, [PeerLost("dead")] * 10_000, False))
            await node.submit(Create(2, 1, task_of(config), 0))
            await shell.until(lambda shell: shell.status["slots"]["free"] == 2)
            assert now() >= config.cluster.silence_seconds
            shell.connect(node.name, node.peer)
            assert (await node.fails(Step(1, 1, 0, "x"))).reason == "refused_stale"

    logical(play())


def test_one_delivery_is_in_flight_per_node_and_the_rest_gathers() -> None:
    config = latency({}, workers=1, instances=64)

    async def play() -> None:
        async with running(config, InProcessWorkers.of(config)) as shell:
            node = Node(shell, patience=PATIENT)
            in_flight = most = 0

            class Slow:
                name = node.name

                async def call(self, method: str, body: bytes, timeout: float) -> bytes:
                    nonlocal in_flight, most
                    in_flight += 1
                    most = max(most, in_flight)
                    await asyncio.sleep(1.0)
                    in_flight -= 1
                    return await node.service.handle(method, body)

            shell.connect(node.name, Slow())
            await asyncio.gather(*(node.create(episode, task=task_of(config)) for episode in range(64)))
            assert most == 1 and node.deliveries <= 3

    logical(play())


def test_bad_calls_are_answered_not_raised() -> None:
    config = latency({})

    async def play() -> None:
        async with running(config, InProcessWorkers.of(config)) as shell:
            node = Node(shell)
            with pytest.raises(RemoteError, match="not connected"):
                await ask(node.pool, ENV_SUBMIT, EnvSubmit("stranger", 1, [Close(1, 1)]), 1.0)
            status = await ask(node.pool, POOL_STATUS, PoolStatusRequest(), 1.0)
            assert status.data["slots"]["free"] == config.envpool.workers * config.envpool.instances
            assert b"Failure" in await shell.handle("env_submit", b"rubbish")

    logical(play())


def test_a_mistake_of_our_own_ends_the_pool_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """F60: nothing that runs in a callback disappears."""
    config = latency({"mean": 1.0})

    async def play() -> None:
        async with running(config, InProcessWorkers.of(config)) as shell:
            node = Node(shell)
            await node.create(1, task=task_of(config))
            monkeypatch.setattr("envpool.instances.Instances._stepped", None)
            await node.submit(Step(1, 1, 0, "x"))
            with pytest.raises(RunFailed, match="envpool-0 failed: TypeError"):
                await shell.run()

    logical(play())


def test_run_ends_when_the_pool_is_stopped() -> None:
    config = latency({})

    async def play() -> None:
        shell = WatchedShell(config, InProcessWorkers.of(config))
        await shell.start()
        run = asyncio.create_task(shell.run())
        await asyncio.sleep(0)
        assert not run.done()
        await shell.stop()
        await run

    logical(play())


def test_unknown_suites_are_refused_before_anything_starts() -> None:
    with pytest.raises(UserError, match="no environment suite"):
        InProcessWorkers.of(make_config("nowhere"))


def test_hangs_owe_for_ever() -> None:
    config = latency({"hang": 1.0})
    environment = load_suite("latency", config.task.args).make(task_of(config), 0)
    assert isinstance(environment, LatencyEnvironment)
    environment.defer()
    environment.reset(task_of(config), 0)
    environment.step("x")
    assert environment.owed() == math.inf


def test_the_faulty_suite_also_runs_in_process() -> None:
    """F64: one bad episode among many is its own failure only."""
    config = make_config(FAULTY, workers=1, instances=100)

    async def play() -> None:
        async with running(config, InProcessWorkers.of(config)) as shell:
            node = Node(shell, patience=PATIENT)

            async def live(episode: int) -> str:
                await node.create(episode, task=a_task(episode))
                reply = await node.call(Step(episode, 1, 0, "raise" if episode == 41 else "end"))
                return reply.reason if isinstance(reply, EnvFailed) else "done"

            ends = await asyncio.gather(*map(live, range(100)))
            assert ends.count("done") == 99 and ends[41] == "env_error"

    logical(play())
