"""SIGKILL of every part of a run: it goes on, or it ends within a minute, non-zero, with one sentence that names the part.

Never a hang, never exit code 0 otherwise, and no process left behind (F51, F60, F70).
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from e2e_run import END_SECONDS, LONG, START_SECONDS, Command, assert_whole, fetch, kill, lines_of, segue, summary_of

from segue.rundir import RunDir

pytestmark = pytest.mark.processes


@contextmanager
def running(config: Path, run: Path, *flags: str, after: int = 2) -> Iterator[Command]:
    """A long run in which `after` steps are trained."""
    with Command("train", config, "--run", run, *LONG, *flags) as command:
        command.steps(after)
        yield command


def assert_ends_naming(command: Command, part: str) -> None:
    """From the kill on: the end within a minute, exit code 1, one sentence with the part's name, nothing left."""
    assert command.wait(END_SECONDS) == 1, command.tails()
    assert command.sentence().startswith(f"{part} died"), command.tails()
    command.assert_nothing_left()


def role(target: str) -> Callable[[Command], int]:
    return lambda command: command.role_pid(target)


def process(name: str) -> Callable[[Command], int]:
    return lambda command: command.pid_of(name)


@pytest.mark.parametrize(
    ("victim", "part"),
    [
        (role("learner-0"), "learner-0"),
        pytest.param(role("scheduler-0"), "scheduler-0", marks=pytest.mark.full),
        pytest.param(process("gcs_server"), "Ray's control store (gcs_server)", marks=pytest.mark.full),
        pytest.param(process("raylet"), "Ray's node process (raylet)", marks=pytest.mark.full),
        pytest.param(process("segue.cluster.driver"), "The driver", marks=pytest.mark.full),
    ],
    ids=["learner", "scheduler", "gcs_server", "raylet", "driver"],
)
def test_the_death_of_a_part_the_run_needs_is_named(
    smoke: Path, tmp_path: Path, victim: Callable[[Command], int], part: str
) -> None:
    with running(smoke, tmp_path / "run") as command:
        kill(victim(command))
        assert_ends_naming(command, part)
    assert RunDir.open(tmp_path / "run").latest_checkpoint().step >= 1


@pytest.mark.parametrize("nodes", [1, pytest.param(2, marks=pytest.mark.full)])
def test_a_rollout_node_is_replaced_and_its_episodes_go_on(smoke: Path, tmp_path: Path, nodes: int) -> None:
    run, steps = tmp_path / "run", 12
    with running(smoke, run, "--set", f"steps={steps}", "--set", f"rollout.nodes={nodes}", after=1) as command:
        last = f"rollout-{nodes - 1}"
        node = command.role_pid(last)
        kill(node)
        command.line(rf"^{last} died; starting it again", END_SECONDS)
        command.steps(steps, START_SECONDS)
        assert command.role_pid(last) != node
        assert command.wait(END_SECONDS) == 0, command.tails()
        command.assert_nothing_left()
    assert_whole(run, steps)
    assert summary_of(run)["episodes"]["failed"] == {}
    assert (run / "logs" / f"{last}.1-2.log").is_file(), "the second process has a log of its own"


@pytest.mark.full
def test_two_rollout_nodes_that_die_together_are_both_replaced(smoke: Path, tmp_path: Path) -> None:
    """Their restarts overlap: each must find the other, and the learner's transfers both of them."""
    run, steps = tmp_path / "run", 24
    with running(smoke, run, "--set", f"steps={steps}", "--set", "rollout.nodes=2", after=1) as command:
        nodes = {name: command.role_pid(name) for name in ("rollout-0", "rollout-1")}
        for pid in nodes.values():
            kill(pid)
        for name in nodes:
            command.line(rf"^{name} died; starting it again", END_SECONDS)
        command.steps(steps // 2, START_SECONDS)
        assert all(command.role_pid(name) != pid for name, pid in nodes.items())
        for name in nodes:
            told = fetch(command.targets()[name], "/metrics")[2]
            assert re.search(r'^segue_process_restarts_total\{.*reason="died".*\} 1(\.0)?$', told, re.M), told
        assert command.wait(END_SECONDS) == 0, command.tails()
        command.assert_nothing_left()
    assert_whole(run, steps)
    assert summary_of(run)["episodes"]["failed"] == {}


@pytest.mark.full
def test_a_rollout_node_that_dies_again_and_again_is_named(smoke: Path, tmp_path: Path) -> None:
    with running(smoke, tmp_path / "run", "--set", "cluster.restarts=0") as command:
        kill(command.role_pid("rollout-0"))
        assert command.wait(END_SECONDS) == 1, command.tails()
        assert command.sentence().startswith("rollout-0 died once in an hour"), command.tails()
        command.assert_nothing_left()


def test_the_death_of_the_supervisor_ends_everything(smoke: Path, tmp_path: Path) -> None:
    """Nobody is left to name it; but nothing runs on, and the run can be gone on with."""
    run = tmp_path / "run"
    with running(smoke, run) as command:
        before = lines_of(run)
        kill(command.pid)
        assert command.wait(END_SECONDS) == -signal.SIGKILL
        command.assert_nothing_left(within=END_SECONDS)
    step = RunDir.open(run).latest_checkpoint().step
    again = segue("train", smoke, "--run", run, *LONG, "--resume", "--set", f"steps={step + 2}", "--serial")
    assert again.wait() == 0, again.tails()
    assert_whole(run, step + 2)
    assert lines_of(run)[step]["version"] > max(line["version"] for line in before), "ids are not used twice"


def test_env_workers_and_their_pool_are_replaced(smoke: Path, tmp_path: Path) -> None:
    """A guard, a host, the pool: each is started anew, and no episode fails."""
    run = tmp_path / "run"
    steps = 12
    with running(smoke, run, "--set", f"steps={steps}", after=1) as command:
        (guard, _), (_, host), *_ = command.env_workers()
        kill(guard)
        kill(host)
        command.steps(2, END_SECONDS)
        pool = command.role_pid("envpool-0")
        kill(pool)
        command.line(r"^envpool-0 died; starting it again", END_SECONDS)
        command.steps(steps, END_SECONDS)
        assert command.role_pid("envpool-0") != pool
        assert not [line for line in command.out if "raylet" in line], "Ray's own words go to the log"
        assert command.wait(END_SECONDS) == 0, command.tails()
        command.assert_nothing_left()
    assert_whole(run, steps)
    assert summary_of(run)["episodes"]["failed"] == {}


def test_a_stopped_role_is_named_for_its_silence(smoke: Path, tmp_path: Path) -> None:
    """SIGSTOP: alive for the kernel, dead for the run."""
    with running(smoke, tmp_path / "run", "--set", "cluster.silence_seconds=5", after=1) as command:
        os.kill(command.role_pid("learner-0"), signal.SIGSTOP)
        assert command.wait(END_SECONDS) == 1
        assert "learner-0 has not answered for cluster.silence_seconds = 5" in command.sentence()
        command.assert_nothing_left()


@pytest.mark.full
def test_a_stopped_rollout_node_is_replaced(smoke: Path, tmp_path: Path) -> None:
    """What it held is leased anew once its leases run out, before or after its replacement runs."""
    run, steps = tmp_path / "run", 8
    flags = ("--set", "cluster.silence_seconds=5", "--set", f"steps={steps}")
    with running(smoke, run, *flags, after=1) as command:
        node = command.role_pid("rollout-0")
        os.kill(node, signal.SIGSTOP)
        command.line(r"^rollout-0 has not answered for cluster.silence_seconds = 5", END_SECONDS)
        command.steps(steps, START_SECONDS)
        assert command.wait(END_SECONDS) == 0, command.tails()
        command.assert_nothing_left()
    assert_whole(run, steps)


def test_a_death_during_the_start_is_named(smoke: Path, tmp_path: Path) -> None:
    with Command("train", smoke, "--run", tmp_path / "run", *LONG) as command:
        kill(command.pid_of("ray::RoleActor", within=START_SECONDS))
        assert command.wait(END_SECONDS) == 1
        assert " died" in command.sentence()
        command.assert_nothing_left()
