"""Real worker processes: what they do when environments hang, crash, fork and lie, and that nothing survives them."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from pool_harness import FAULTY, PATIENCE, Node, a_task, make_config, running

from envpool.environment import play
from envpool.suites import load_suite
from segue.episode import ActionRecord
from segue.errors import RunFailed, UserError
from segue.ports.envpool import Create, Created, EnvFailed, Restore, Step, Stepped, observation_digest

pytestmark = pytest.mark.processes


@pytest.fixture(autouse=True)
def _suite_on_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parent))


def exists(pid: int) -> bool:
    """Whether there is such a process, zombies included."""
    return Path(f"/proc/{pid}").exists()


def seen(reply: Stepped) -> str:
    """What a step let one observe, without its count."""
    return reply.result.observation.messages[-1].content.partition(": ")[2]


async def test_an_episode_runs_to_its_end_and_leaves_a_free_slot() -> None:
    async with running(make_config(FAULTY, workers=2, instances=2)) as shell:
        node = Node(shell)
        created = await node.create(1)
        assert created.observation.messages[0].content == "task 1 "
        assert (await node.step(1, 0, "hello")).result.reward == 1.0
        last = await node.step(1, 1, "end")
        assert last.result.terminated and last.result.observation.messages[-1].content == "2: end"
        await node.close(1)
        await shell.until_free()


async def test_blocking_steps_of_one_worker_overlap() -> None:
    """Two instances that hang do not keep a third from stepping; only deadlines end them."""
    async with running(make_config(FAULTY, workers=1, instances=3)) as shell:
        node = Node(shell)
        for episode in (1, 2, 3):
            await node.create(episode)
        await node.submit(Step(1, 1, 0, "hang"), Step(2, 1, 0, "hang"))
        for step in range(5):
            await node.step(3, step, "go on")


async def test_sigkill_of_a_worker_fails_its_waiter_at_once_and_a_new_one_takes_its_seat() -> None:
    """F70: exit is observed as an event; the waiter is failed by type, slots come back, nothing is replayed silently."""
    async with running(make_config(FAULTY, workers=1, instances=2)) as shell:
        node = Node(shell)
        await node.create(1)
        await node.create(2)
        _, host = shell.processes.pids()[0]
        call = asyncio.create_task(node.call(Step(1, 1, 0, "hang")))
        await node.step(2, 0, "x")
        os.kill(host, signal.SIGKILL)
        failed = await call
        assert (failed.failure, failed.reason) == ("infra", "worker_died")  # type: ignore[union-attr]
        assert "SIGKILL" in failed.detail  # type: ignore[union-attr]
        bystander = await node.fails(Step(2, 1, 1, "y"))
        assert (bystander.failure, bystander.reason) == ("infra", "worker_killed")
        await shell.until_free()
        assert shell.processes.pids()[0][1] not in (0, host)
        assert shell.metrics.value("segue_env_crashes_total") == 1
        assert shell.metrics.value("segue_env_respawns_total") == 1
        await node.create(1, attempt=2)


async def test_sigkill_of_the_guard_takes_the_host_and_its_children_along() -> None:
    async with running(make_config(FAULTY, workers=1, instances=1)) as shell:
        node = Node(shell)
        await node.create(1)
        child = int(seen(await node.step(1, 0, "child")))
        guard, host = shell.processes.pids()[0]
        call = asyncio.create_task(node.call(Step(1, 1, 1, "hang")))
        await node.accepted(1, 0)
        os.kill(guard, signal.SIGKILL)
        assert (await call).reason == "worker_died"  # type: ignore[union-attr]
        await shell.until_free()
        for pid in (host, child):
            await until_dead(pid)


async def until_dead(pid: int) -> None:
    """Until a process that is not our child has ended (a zombie that its new parent has yet to reap counts as ended)."""
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ended = asyncio.Event()
    asyncio.get_running_loop().add_reader(pidfd, ended.set)
    try:
        await asyncio.wait_for(ended.wait(), PATIENCE)
    finally:
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)


@pytest.mark.parametrize("how", ["hang", "spin"])
async def test_a_step_past_its_deadline_costs_the_worker_and_everything_below_it(how: str) -> None:
    """F72, F79: also one that never lets go of the interpreter lock; children in and outside the process group are gone."""
    async with running(make_config(FAULTY, workers=1, instances=2, step_seconds=1.5)) as shell:
        node = Node(shell)
        await node.create(1)
        await node.create(2)
        pids = [int(seen(await node.step(1, step, action))) for step, action in enumerate(("child", "fork", "daemon"))]
        assert all(map(exists, pids))
        failed = await node.fails(Step(1, 1, 3, how))
        assert (failed.failure, failed.reason) == ("env", "step_timeout")
        assert (await node.fails(Step(2, 1, 0, "x"))).reason == "worker_killed"
        await shell.until_free()
        assert shell.ends == 1
        assert not any(map(exists, pids))
        assert shell.metrics.value("segue_env_timeouts_total") == 1
        assert shell.metrics.value("segue_env_kills_total", reason="step_timeout") == 1


@pytest.mark.parametrize(
    ("args", "limits", "reason"),
    [
        ({"make": "hang"}, {"create_seconds": 1.0}, "create_timeout"),
        ({"reset": "hang"}, {"reset_seconds": 0.3}, "reset_timeout"),
    ],
)
async def test_create_and_reset_have_deadlines_of_their_own(args: dict[str, str], limits: dict[str, float], reason: str) -> None:
    async with running(make_config(FAULTY, args, workers=1, instances=1, **limits)) as shell:
        failed = await Node(shell).fails(Create(1, 1, a_task(), 0))
        assert (failed.failure, failed.reason) == ("env", reason)
        await shell.until_free()


async def test_a_close_past_its_deadline_costs_the_worker_but_no_reply() -> None:
    async with running(make_config(FAULTY, {"close": "hang"}, workers=1, instances=1, close_seconds=0.3)) as shell:
        node = Node(shell)
        await node.create(1)
        await node.close(1)
        await shell.until(lambda shell: shell.ends == 1)
        await shell.until_free()
        assert len(node.replies) == 1
        assert shell.metrics.value("segue_env_kills_total", reason="close_timeout") == 1


async def test_cancel_during_create_leaks_nothing() -> None:
    """F71: the episode is closed while its environment is still being made; the instance is closed once it is there."""
    async with running(make_config(FAULTY, {"make": "slow 0.3"}, workers=1, instances=1)) as shell:
        node = Node(shell)
        await node.submit(Create(1, 1, a_task(), 0))
        await node.close(1)
        assert shell.status["slots"]["leased"] == 1
        await shell.until_free()
        assert node.replies == []
        await node.create(2)


async def test_sixty_kills_right_after_the_start_leave_no_survivor() -> None:
    """F79. Workers are killed at every point of their start, with a child of their own under way."""
    async with running(make_config(FAULTY, {"load": "child"}, workers=4, instances=1, respawns_per_minute=1000)) as shell:

        async def kill_again_and_again(seat: int) -> None:
            for generation in range(1, 16):
                guard, _ = shell.processes.pids()[seat]
                members = await family(guard, generation % 3)
                shell.processes.kill(seat, generation)
                await shell.until(lambda shell, key=(seat, generation): key in shell.gone_from)
                assert not any(map(exists, members)), (generation, members)
                if generation < 15:
                    shell.processes.spawn(seat, generation + 1)

        await asyncio.gather(*map(kill_again_and_again, range(4)))


async def family(guard: int, depth: int) -> list[int]:
    """The guard and up to `depth` generations below it, once they are there."""
    members, latest = [guard], [guard]
    while depth and exists(guard):
        below = [child for pid in latest for child in children(pid)]
        if below:
            members += below
            latest, depth = below, depth - 1
        await asyncio.sleep(0)
    return members


def children(pid: int) -> list[int]:
    """Direct children, of all threads."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += map(int, path.read_text().split())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


POOL = """
import asyncio, sys
from pool_harness import FAULTY, Node, Step, make_config, running

async def main():
    async with running(make_config(FAULTY, workers=3, instances=1)) as shell:
        node = Node(shell)
        pids = [pid for pair in shell.processes.pids().values() for pid in pair if pid]
        for episode, action in ((1, "child"), (2, "daemon")):
            await node.create(episode)
            pids.append(int((await node.step(episode, 0, action)).result.observation.messages[-1].content.split(": ")[1]))
        await node.create(3)
        await node.submit(Step(3, 1, 0, "spin"))  # this one can not even notice that its channel ended
        pids += [pid for pair in shell.processes.pids().values() for pid in pair]
        print(*sorted(set(pids)), flush=True)
        await asyncio.sleep(1000)

asyncio.run(main())
"""


async def test_the_death_of_a_pool_leaves_no_worker_and_no_child_of_one() -> None:
    pool = subprocess.Popen([sys.executable, "-c", POOL], stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220
    assert pool.stdout is not None
    pids = [int(word) for word in pool.stdout.readline().split()]
    assert len(pids) == 8 and all(map(exists, pids))
    pool.kill()
    pool.wait()
    for pid in pids:
        await until_dead(pid)


@pytest.mark.parametrize("how", ["exit 70", "sigkill"])
async def test_a_crash_names_how_the_worker_ended(how: str) -> None:
    async with running(make_config(FAULTY, workers=1, instances=1)) as shell:
        node = Node(shell)
        await node.create(1)
        failed = await node.fails(Step(1, 1, 0, how))
        assert failed.reason == "worker_died"
        assert ("exited with code 70" if how == "exit 70" else "was ended by SIGKILL") in failed.detail


async def test_standard_streams_are_out_of_reach_of_environments() -> None:
    """What environments print does not reach the channel, and reading standard input ends at once."""
    async with running(make_config(FAULTY, workers=1, instances=1)) as shell:
        node = Node(shell)
        await node.create(1)
        await node.step(1, 0, "print")
        assert seen(await node.step(1, 1, "stdin")) == "''"


async def test_exceptions_are_typed_and_cost_only_their_own_instance() -> None:
    """F64, F81: the instance is destroyed, not reused; the others in the worker go on."""
    async with running(make_config(FAULTY, workers=1, instances=2)) as shell:
        node = Node(shell)
        await node.create(100)
        for episode, (action, failure) in enumerate(
            [("raise", "env"), ("sysexit", "env"), ("data", "data"), ("garbage", "env"), ("both", "env"), ("nan", "env"),
             ("nested", "env"), ("surrogate", "env")]
        ):  # fmt: skip
            await node.create(episode)
            failed = await node.fails(Step(episode, 1, 0, action))
            assert (failed.failure, failed.reason) == (failure, f"{failure}_error"), action
            assert (await node.fails(Step(episode, 1, 0, action))).reason == failed.reason
            await node.step(100, episode, "on")
        await node.close(100)
        await shell.until_free()
        assert shell.ends == 0


@pytest.mark.parametrize("resume", ["snapshot", "replay"])
async def test_an_episode_goes_on_elsewhere_after_its_worker_died(resume: str) -> None:
    async with running(make_config(FAULTY, {"resume": resume}, workers=2, instances=1)) as shell:
        node = Node(shell)
        await node.create(1)
        replies = [await node.step(1, k, f"say {k}") for k in range(3)]
        assert (await node.fails(Step(1, 1, 3, "exit 1"))).reason == "worker_died"
        records = [ActionRecord(f"say {k}", observation_digest(replies[k].result.observation)) for k in range(3)]
        restore = Restore(replies[0].snapshot, 0, records[1:]) if resume == "snapshot" else Restore(None, -1, records)
        created = await node.create(1, attempt=2, restore=restore)
        assert created.observation == replies[-1].result.observation
        assert (await node.step(1, 3, "say 3", attempt=2)).result.reward == 4.0


async def test_an_environment_may_run_an_event_loop_of_its_own() -> None:
    """F80: environment code never shares the transport's loop."""
    async with running(make_config(FAULTY, workers=1, instances=1)) as shell:
        node = Node(shell)
        await node.create(1)
        assert seen(await node.step(1, 0, "asyncio")) == "ran"


async def test_rubbish_on_the_channel_costs_the_worker_only() -> None:
    async with running(make_config(FAULTY, workers=1, instances=1)) as shell:
        node = Node(shell)
        await node.create(1)
        assert (await node.fails(Step(1, 1, 0, "rubbish"))).reason == "worker_died"
        await shell.until_free()
        await node.create(1, attempt=2)


async def test_workers_share_the_session_of_their_pool_and_have_groups_of_their_own() -> None:
    """A session of its own is an autogroup of its own, which Linux let wait for seconds beside a busy rollout node."""
    async with running(make_config(FAULTY, workers=1, instances=1)) as shell:
        await Node(shell).create(1)
        guard, host = shell.processes.pids()[0]
        assert {os.getsid(pid) for pid in (guard, host)} == {os.getsid(0)}
        assert [os.getpgid(pid) for pid in (guard, host)] == [guard, host]


async def test_a_guard_that_does_not_react_is_ended_by_force(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("envpool.workers.GRACE_SECONDS", 0.2)
    async with running(make_config(FAULTY, workers=1, instances=1, step_seconds=1.5)) as shell:
        node = Node(shell)
        await node.create(1)
        child = int(seen(await node.step(1, 0, "child")))
        guard, host = shell.processes.pids()[0]
        os.kill(guard, signal.SIGSTOP)
        assert (await node.fails(Step(1, 1, 1, "hang"))).reason == "step_timeout"
        await shell.until_free()
        for pid in (guard, host, child):
            await until_dead(pid)


SUITES: list[tuple[str, dict[str, object]]] = [
    ("search_qa", {}),
    ("latency", {"turns_min": 4, "turns_max": 4}),
    ("latency", {"turns_min": 3, "turns_max": 3, "snapshots": False}),
]


@pytest.mark.parametrize(("env", "args"), SUITES, ids=["search_qa", "latency", "latency-replay"])
async def test_killed_after_every_step_and_restored_elsewhere_the_future_is_equal(env: str, args: dict[str, object]) -> None:
    """environments.md §5: at every step of every suite, snapshot, SIGKILL, restore in another process, compare what follows."""
    suite = load_suite(env, args)
    task = suite.tasks("train", 1, 0)[0]
    whole = play(suite.make(task, 0), task, suite.oracle(task))
    actions = [turn.action for turn in whole.turns]
    records = [ActionRecord(turn.action, observation_digest(turn.result.observation)) for turn in whole.turns]
    async with running(make_config(env, args, workers=2, instances=1)) as shell:
        node = Node(shell)
        for k in range(len(actions)):
            episode = 100 + k
            snapshot = (await node.create(episode, task=task)).snapshot
            stored, lost = -1, []
            for step in range(k):
                reply = await node.step(episode, step, actions[step])
                if step % 2 == 0:  # only some snapshots reached the log: the rest is replayed
                    snapshot, stored = reply.snapshot, step
            for _, host in shell.processes.pids().values():
                with contextlib.suppress(ProcessLookupError):
                    if host:
                        os.kill(host, signal.SIGKILL)
                        lost.append(host)
            restore = Restore(snapshot, stored, records[stored + 1 : k]) if snapshot else Restore(None, -1, records[:k])
            created = await node.call(Create(episode, 2, task, 0, restore))
            attempt = 2
            while isinstance(created, EnvFailed):  # the pool may not have noticed both deaths yet
                assert created.failure == "infra"
                attempt += 1
                created = await node.call(Create(episode, attempt, task, 0, restore))
            assert isinstance(created, Created)
            expected = whole.turns[k - 1].result.observation if k else whole.prompt
            assert created.observation.messages == expected.messages
            for step in range(k, len(actions)):
                reply = await node.step(episode, step, actions[step], attempt)
                assert reply.result == whole.turns[step].result
            await node.close(episode, attempt)


async def test_workers_that_cannot_load_the_suite_end_the_pool_with_the_sentence() -> None:
    with pytest.raises(UserError, match=r"did you mean task\.args\.reset"):
        async with running(make_config(FAULTY, {"resett": "x"}, workers=2)):
            pass
    with pytest.raises(UserError, match="does not want to"):
        async with running(make_config(FAULTY, {"load": "user"}, workers=2)):
            pass
    with pytest.raises(UserError, match="cannot be imported"):
        async with running(make_config("no_such_module:build", workers=1)):
            pass
    with pytest.raises(UserError, match=r"could not be made \(RuntimeError: as asked in faulty_suite\.py:\d+\): mend it"):
        async with running(make_config(FAULTY, {"load": "raise"}, workers=2)):
            pass


async def test_workers_that_die_while_they_start_end_the_pool_instead_of_looping() -> None:
    with pytest.raises(RunFailed, match="3 env workers in a row failed to start; the last one exited with code 5"):
        async with running(make_config(FAULTY, {"load": "exit 5"}, workers=1)):
            pass


async def test_a_worker_that_does_not_get_ready_is_killed_and_counts_as_one_that_died() -> None:
    with pytest.raises(RunFailed, match="3 env workers in a row failed to start"):
        async with running(make_config(FAULTY, {"load": "hang"}, workers=3, start_seconds=3.0)):
            pass


async def test_crash_after_crash_is_throttled_and_then_said() -> None:
    async with running(make_config(FAULTY, workers=1, instances=1, respawns_per_minute=2)) as shell:
        node = Node(shell)
        reasons = []
        for attempt in range(1, 5):
            reply = await node.call(Create(1, attempt, a_task(), 0))
            if isinstance(reply, EnvFailed):
                reasons.append(reply.reason)
                assert "2 env workers ended within a minute; the last one exited with code 9" in reply.detail
            else:
                reasons.append((await node.fails(Step(1, attempt, 0, "exit 9"))).reason)
        assert reasons == ["worker_died"] * 3 + ["respawn_limit"]


async def test_large_snapshots_are_not_sent_and_large_messages_are() -> None:
    async with running(make_config(FAULTY, workers=1, instances=1, snapshot_bytes=1 << 20)) as shell:
        node = Node(shell)
        await node.create(1)
        for step, (size, sent) in enumerate([(1 << 20, True), ((1 << 20) + 1, False)]):
            snapshot = (await node.step(1, step, f"big {size}")).snapshot
            assert (len(snapshot) if snapshot is not None else None) == (size if sent else None)
        text = "z" * (3 << 20)
        assert seen(await node.step(1, 2, text)) == text


def test_the_worker_imports_neither_torch_nor_ray_nor_config() -> None:
    code = (
        "import envpool.worker, envpool.host, envpool.suites.search_qa, envpool.suites.latency, sys;"
        "print([m for m in ('torch', 'ray', 'transformers', 'pydantic', 'segue.config') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
