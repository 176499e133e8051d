"""Runs on several hosts that must not begin, as whole commands on this machine: one sentence on each, and nothing is left."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
from collections.abc import Callable
from pathlib import Path

import pytest
from e2e_run import Command, segue

pytestmark = pytest.mark.processes
TOKEN = {"SEGUE_TOKEN": "the words"}
APART = "cluster.hosts={scheduler=[0], learner=[0], rollout=[1], envpool=[1]}"
_NEW_MOUNTS, _PRIVATE = 0x00020000, 0x4000 | 0x40000
"""CLONE_NEWNS; MS_REC | MS_PRIVATE."""


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def head(smoke: Path, run: Path, port: int, hosts: int, *more: object) -> tuple[object, ...]:
    return ("train", smoke, "--run", run, "--hosts", hosts, "--address", "127.0.0.1", "--port", port, *more)


def member(port: int, rank: int) -> tuple[object, ...]:
    return ("join", "--address", "127.0.0.1", "--port", port, "--rank", rank, "--seconds", 60)


def test_hosts_that_do_not_come_are_named(smoke: Path, tmp_path: Path, port: int) -> None:
    command = segue(*head(smoke, tmp_path / "run", port, 3, "--set", "cluster.join_seconds=0.5"), env=TOKEN)
    assert command.wait() == 1, command.tails()
    assert command.sentence() == (
        f"Host 1, 2 of 3 did not appear at 127.0.0.1:{port} within cluster.join_seconds = 0.5: start launch.sh there with "
        "NODE_RANK=1 and HEAD_ADDR=127.0.0.1."
    )
    assert not (tmp_path / "run").exists(), "nothing was begun"


def test_another_token_is_one_sentence_there(smoke: Path, tmp_path: Path, port: int) -> None:
    """And the first host waits on: it may be anybody."""
    with Command(*head(smoke, tmp_path / "run", port, 2), env=TOKEN) as first:
        other = segue(*member(port, 1), env={"SEGUE_TOKEN": "other words"})
        assert other.wait() == 2, other.tails()
        assert other.sentence() == (
            f"The run at 127.0.0.1:{port} has another token: set SEGUE_TOKEN to the same words on all hosts, or share "
            "~/.segue/token."
        )
        first.signal(signal.SIGINT)
        assert (first.wait(), first.err) == (130, ["Interrupted."]), first.tails()
        first.assert_nothing_left()
    assert not (tmp_path / "run").exists()


def test_a_mistake_in_the_config_is_told_to_the_others_too(smoke: Path, tmp_path: Path, port: int) -> None:
    with Command(*member(port, 1), env=TOKEN) as other:
        first = segue(*head(smoke, tmp_path / "run", port, 2, "--set", "steps=0"), env=TOKEN)
        assert first.wait() == 2, first.tails()
        assert "steps = 0" in first.sentence()
        assert other.wait() == 2, other.tails()
        assert other.sentence() == "Host 0 has refused the run, and says there what is to be corrected."
    assert not (tmp_path / "run").exists()


def another_disk(path: Path) -> Callable[[], None]:
    """For a process about to start: it sees another, empty file system at `path`. Skips the test where that is not allowed."""
    if os.geteuid() != 0:
        pytest.skip("only root can mount a file system")
    libc = ctypes.CDLL(None, use_errno=True)

    def apart() -> None:
        if libc.unshare(_NEW_MOUNTS) or libc.mount(b"none", b"/", None, _PRIVATE, None):
            os._exit(77)
        if libc.mount(b"tmpfs", os.fsencode(path), b"tmpfs", 0, None):
            os._exit(77)

    if (pid := os.fork()) == 0:
        apart()
        os._exit(0)
    if os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) != 0:
        pytest.skip("mounting is not allowed here")
    return apart


def test_storage_that_is_not_shared_is_said_after_the_map_and_the_run_taken_back(smoke: Path, tmp_path: Path, port: int) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    apart = another_disk(runs)
    with (
        Command(*member(port, 1), env=TOKEN, preexec=apart) as other,
        Command(*head(smoke, runs / "run", port, 2, "--set", APART), env=TOKEN) as first,
    ):
        assert first.wait() == 2, first.tails()
        assert re.match(rf"Host 1 \(.*\) does not see {runs}/run/\.seen-by-all-\w+ as host 0 does: ", first.sentence())
        assert "on storage that all hosts share" in first.sentence()
        for number, roles in enumerate(("scheduler-0, learner-0", "rollout-0, rollout-1, envpool-0")):
            first.line(rf"^  host {number}    \S+ at 127\.0\.0\.1, .*\d cores: {roles}$")
        assert other.wait() == 0, other.tails()
        assert "Segue: the run has ended with exit code 2." in other.out
    assert list(runs.iterdir()) == [], "the name is free again"


NO_RAY = """
import sys
print("there is no room in /tmp", file=sys.stderr)
sys.exit(1)
"""
"""Takes the place of `ray start` on one host."""


@pytest.mark.full
def test_a_host_that_cannot_join_ray_is_named(smoke: Path, tmp_path: Path, port: int) -> None:
    scripts = tmp_path / "stand-in" / "ray" / "scripts"
    scripts.mkdir(parents=True)
    for folder in (scripts.parent, scripts):
        (folder / "__init__.py").touch()
    (scripts / "scripts.py").write_text(NO_RAY)
    run = tmp_path / "run"
    more = ("--set", APART, "--set", "cluster.start_seconds=30")
    with (
        Command(*member(port, 1), env=TOKEN | {"PYTHONPATH": str(tmp_path / "stand-in")}) as other,
        Command(*head(smoke, run, port, 2, *more), env=TOKEN) as first,
    ):
        assert first.wait() == 1, first.tails()
        assert re.match(
            r"Host 1 \(.*\) was no node of Ray within cluster\.start_seconds = 30: see .*host-1\.log", first.sentence()
        )
        first.line(r"^host 1 \(.*\) lost its Ray and joins again: its node process ended with exit code 1")
        assert other.wait() == 0, other.tails()
        assert "Segue: the run has ended with exit code 1." in other.out
        for command in (first, other):
            command.assert_nothing_left()
    assert "there is no room in /tmp" in (run / "logs" / "host-1.log").read_text()
